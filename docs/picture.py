"""Makes docs/images/score.svg: what `attnprobe score --chat` prints, in colour.

python docs/picture.py "Who wrote Hamlet?"
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console

import attnprobe as ap
from attnprobe.cli.render import print_score

prompt = sys.argv[1] if len(sys.argv) > 1 else "Who wrote Hamlet?"
console = Console(
    record=True, width=84, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
)
console.print(f'$ attnprobe score "{prompt}" --chat', style="bold", markup=False)
(answer,) = ap.score(ap.load_model(), prompt, chat=True, max_new_tokens=20)
print_score(console, answer)
target = Path(__file__).parent / "images" / "score.svg"
svg = console.export_svg(title="attnprobe")
# a picture that needs no network: the reader's own monospaced font will do
target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))
print(target)
