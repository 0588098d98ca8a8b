"""What the commands print with: colours and progress on a terminal only, and never with NO_COLOR or TERM=dumb."""

import os
import shutil
import sys
import time

_CODES = {"python": "1", "native": "36", "kernel": "35", "interpreter": "2", "other": "2", "bad": "31", "good": "32",
          "head": "1", "dim": "2"}


def is_terminal(stream):
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def width(stream):
    """Columns to keep to; None when nobody looks."""
    return shutil.get_terminal_size((80, 24)).columns if is_terminal(stream) else None


def painter(stream):
    """paint(style, text): with colour if the stream takes it."""
    if is_terminal(stream) and not os.environ.get("NO_COLOR"):
        return lambda style, text: f"\x1b[{_CODES[style]}m{text}\x1b[0m"
    return lambda style, text: text


def cut(text, columns):
    """At most so many columns (None: all), with a mark where something is missing; nothing that moves a terminal."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if columns is None or len(text) <= columns else text[:columns - 1] + "~" if columns > 0 else ""


def can_draw(stream):
    """Can the stream show box-drawing characters?"""
    try:
        "├└│─".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class Progress:
    """One line on standard error that is drawn over and removed; nothing if that is no terminal."""

    def __init__(self, text):
        self.text, self.shown, self.next = text, False, 0.0

    def __call__(self, number):
        if is_terminal(sys.stderr) and time.monotonic() >= self.next:
            self.next = time.monotonic() + 0.1
            self.shown = True
            print(f"\r\x1b[K{cut(self.text.format(number), width(sys.stderr) - 1)}", end="", file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
