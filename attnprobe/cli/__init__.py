"""The command line: `attnprobe score` and `attnprobe models`."""
