"""python -m perf_trampoline, and the script perf-trampoline."""

import sys

from perf_trampoline import _command_line


def main():
    sys.exit(_command_line.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
