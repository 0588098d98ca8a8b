#!/usr/bin/env python3
"""A jitdump, checked field by field.

    jitdump.py FILE             print it
    jitdump.read(path)          -> Header, [record, ...]

Written from tools/perf/Documentation/jitdump-specification.txt and tools/perf/util/jitdump.h in Linux, whose names the
fields have; it shares nothing with the writer, whose errors it is to find. Where perf is lenient this is strict.
"""

import dataclasses
import re
import struct
import sys
from pathlib import Path

MAGIC = {b'DTiJ': '<', b'JiTD': '>'}    # the same number in either byte order, and struct's mark of that order
ARCH_TIMESTAMP = 1                      # the only flag
SAME_FILE = b'\xff'                     # in place of a debug entry's file name: that of the entry before


class JitdumpError(Exception):
    """Not a valid jitdump; the message tells the offset and the reason."""


@dataclasses.dataclass(frozen=True)
class Header:
    version: int
    total_size: int
    elf_mach: int
    pad1: int
    pid: int
    timestamp: int
    flags: int
    byteorder: str          # as int.from_bytes() takes it
    complete: bool          # false: unused room is at the end, the writer lives or was killed


@dataclasses.dataclass(frozen=True)
class Record:
    offset: int             # in the file
    total_size: int
    timestamp: int


@dataclasses.dataclass(frozen=True)
class CodeLoad(Record):
    pid: int
    tid: int
    vma: int
    code_addr: int
    code_size: int
    code_index: int
    name: str
    code: bytes


@dataclasses.dataclass(frozen=True)
class CodeMove(Record):
    pid: int
    tid: int
    vma: int
    old_code_addr: int
    new_code_addr: int
    code_size: int
    code_index: int


@dataclasses.dataclass(frozen=True)
class DebugEntry:
    addr: int
    lineno: int
    discrim: int
    name: str


@dataclasses.dataclass(frozen=True)
class CodeDebugInfo(Record):
    code_addr: int
    nr_entry: int
    entries: list


@dataclasses.dataclass(frozen=True)
class CodeClose(Record):
    pass


@dataclasses.dataclass(frozen=True)
class CodeUnwindingInfo(Record):
    unwinding_size: int
    eh_frame_hdr_size: int
    mapped_size: int
    eh_frame: bytes
    eh_frame_hdr: bytes


class _Reader:
    """Takes values from `data`, up to `end`."""

    def __init__(self, data, order, at, end):
        self.data, self.order, self.at, self.end = data, order, at, end

    def fail(self, reason):
        raise JitdumpError(f'offset {self.at:#x}: {reason}')

    def take(self, size):
        if size > self.end - self.at:
            self.fail(f'{size} bytes are needed, {self.end - self.at} are left')
        self.at += size
        return self.data[self.at - size:self.at]

    def numbers(self, layout):
        return struct.unpack(self.order + layout, self.take(struct.calcsize('=' + layout)))

    def string(self):
        nul = self.data.find(b'\0', self.at, self.end)
        if nul < 0:
            self.fail('a string is not ended')
        return self.take(nul + 1 - self.at)[:-1]


def _text(name):
    return name.decode('utf-8', 'surrogateescape')


def _code_load(reader, *prefix):
    numbers = reader.numbers('IIQQQQ')
    name = _text(reader.string())
    return CodeLoad(*prefix, *numbers, name, reader.take(numbers[4]))


def _code_move(reader, *prefix):
    return CodeMove(*prefix, *reader.numbers('IIQQQQQ'))


def _code_debug_info(reader, *prefix):
    code_addr, nr_entry = reader.numbers('QQ')
    entries, name = [], None
    for _ in range(nr_entry):
        numbers = reader.numbers('QII')
        given = reader.string()
        if given != SAME_FILE:
            name = given
        elif name is None:
            reader.fail('the first debug entry has no file name')
        entries.append(DebugEntry(*numbers, _text(name)))
    return CodeDebugInfo(*prefix, code_addr, nr_entry, entries)


def _code_close(reader, *prefix):
    return CodeClose(*prefix)


def _code_unwinding_info(reader, *prefix):
    unwinding_size, eh_frame_hdr_size, mapped_size = reader.numbers('QQQ')
    if not 0 < eh_frame_hdr_size < unwinding_size:
        reader.fail(f'eh_frame_hdr_size {eh_frame_hdr_size} of unwinding_size {unwinding_size}')
    if 0 < mapped_size < unwinding_size:
        reader.fail(f'mapped_size {mapped_size} does not hold unwinding_size {unwinding_size}')
    # The specification's text has these two reversed; perf takes them so.
    eh_frame = reader.take(unwinding_size - eh_frame_hdr_size)
    eh_frame_hdr = reader.take(eh_frame_hdr_size)
    padding = reader.end - reader.at
    if padding < 8 and reader.take(padding).strip(b'\0'):
        reader.fail('the padding is not zero')
    return CodeUnwindingInfo(*prefix, unwinding_size, eh_frame_hdr_size, mapped_size, eh_frame, eh_frame_hdr)


RECORDS = {0: _code_load, 1: _code_move, 2: _code_debug_info, 3: _code_close, 4: _code_unwinding_info}     # by id


def read(path):
    data = Path(path).read_bytes()
    order = MAGIC.get(data[:4])
    reader = _Reader(data, order, 4, len(data))
    if order is None:
        raise JitdumpError('offset 0x0: not the magic of a jitdump')
    numbers = version, total_size, _, pad1, _, _, flags = reader.numbers('IIIIIQQ')
    if (version, total_size, pad1, flags & ~ARCH_TIMESTAMP) != (1, reader.at, 0, 0):
        raise JitdumpError(f'offset 0x4: version {version}, total_size {total_size}, pad1 {pad1}, flags {flags:#x}')
    records = []
    while reader.at < len(data) and data[reader.at:reader.at + 8] != bytes(8):
        records.append(_record(reader))
        reader.at += records[-1].total_size
    byteorder = 'little' if order == '<' else 'big'
    return Header(*numbers, byteorder, complete=reader.at == len(data)), records


def _record(reader):
    """The record at the reader's place, which stays."""
    record = _Reader(reader.data, reader.order, reader.at, reader.end)
    id, total_size, timestamp = record.numbers('IIQ')
    if id not in RECORDS:
        reader.fail(f'unknown record id {id}')
    if not 16 <= total_size <= reader.end - reader.at:
        reader.fail(f'total_size {total_size}, {reader.end - reader.at} bytes are left')
    record.end = reader.at + total_size
    result = RECORDS[id](record, reader.at, total_size, timestamp)
    if record.at != record.end:
        record.fail(f'{record.end - record.at} bytes more than the record needs')
    return result


def _print_fields(title, fields):
    print(title)
    for name, value in fields.items():
        if isinstance(value, bytes):
            value = value.hex(' ')
        elif name in ('vma', 'addr', 'flags') or name.endswith(('code_addr', 'offset')):
            value = hex(value)
        print(f'    {name:18} {value}')


def _print_unwinding(record, code_size, byteorder):
    import eh_frame             # needs pyelftools, and nothing else here does
    frame = eh_frame.decode(record.eh_frame, code_size, byteorder)
    place = frame.initial_location_offset
    location = int.from_bytes(record.eh_frame[place:place + 4], byteorder, signed=True)
    print(f'    {"initial_location":18} {location}\n    {"address_range":18} {frame.address_range}')
    for row in frame.rows:
        print(f'        {row}')


def main(path):
    header, records = read(path)
    _print_fields('header', vars(header))
    for number, record in enumerate(records):
        name = re.sub('([A-Z])', r'_\1', type(record).__name__).upper()
        _print_fields(f'JIT{name}', vars(record))
        load = next((later for later in records[number:] if isinstance(later, CodeLoad)), None)
        if isinstance(record, CodeUnwindingInfo) and load is not None:
            _print_unwinding(record, load.code_size, header.byteorder)


if __name__ == '__main__':
    if len(sys.argv) != 2:
        sys.exit('usage: jitdump.py FILE')
    try:
        main(sys.argv[1])
    except BrokenPipeError:
        pass
    except Exception as error:
        sys.exit(f'jitdump.py: {error}')
