"""Beginnings of Python code, which the shipped pair continues."""

PROMPTS = (
    'def read_chunk(self, size):\n    """Read at most size bytes, returned as a bytes object."""\n',
    "import os\nimport sys\n\ndef walk(top, topdown=True):\n",
    "class Counter(dict):\n    def __init__(self, iterable=None):\n",
    "def parse_args(argv):\n    parser = argparse.ArgumentParser()\n",
)
