"""The journal alone: durable order, group commit, recovery from every kind of damage."""

import asyncio
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from agentlightning.collector.journal import Journal, JournalReader, JournalUnavailable, Kind, Record
from agentlightning.collector.records import HEADER, segment_bases, segment_path
from agentlightning.proto.errors import DataError


def write(
    folder: Path, bodies: Iterable[bytes], *, segment_bytes: int = 1 << 20, start: int = 0
) -> list[int]:
    """Open, append one after the other, close; returns the ends."""

    async def go() -> list[int]:
        journal = Journal(folder, segment_bytes=segment_bytes, start=start)
        ends = [await journal.append(Kind.TRACES, body) for body in bodies]
        await asyncio.to_thread(journal.close)
        return ends

    return asyncio.run(go())


def read(folder: Path, position: int = 0) -> list[Record]:
    reader = JournalReader(folder)
    try:
        return list(reader.read_from(position))
    finally:
        reader.close()


def bodies(records: Iterable[Record]) -> list[bytes]:
    return [record.body for record in records if record.kind is not Kind.QUARANTINED]


def test_records_come_back_in_order_over_segments_and_restarts(tmp_path: Path) -> None:
    draw = random.Random(1)
    sent = [draw.randbytes(draw.randrange(0, 3000)) for _ in range(200)]
    ends = write(tmp_path, sent[:120], segment_bytes=20_000)
    ends += write(tmp_path, sent[120:], segment_bytes=20_000)
    records = read(tmp_path)
    assert bodies(records) == sent
    assert [record.end for record in records] == ends
    assert [record.sequence for record in records] == list(range(200))
    assert len(segment_bases(tmp_path)) > 5
    assert bodies(read(tmp_path, records[150].position)) == sent[150:]
    reader = JournalReader(tmp_path)
    assert reader.read_at(records[3].position) == records[3]
    with pytest.raises(DataError):
        reader.read_at(records[3].position + 1)


def test_a_record_larger_than_a_segment_gets_its_own(tmp_path: Path) -> None:
    sent = [b"a", bytes(100_000), b"b", bytes(70_000)]
    write(tmp_path, sent, segment_bytes=4096)
    assert bodies(read(tmp_path)) == sent


def test_concurrent_appends_share_syncs_and_are_all_stored(tmp_path: Path) -> None:
    async def go() -> int:
        journal = Journal(tmp_path)
        await asyncio.gather(*(journal.append(Kind.LOGS, b"%d" % n) for n in range(500)))
        await asyncio.to_thread(journal.close)
        return journal.commits

    commits = asyncio.run(go())
    assert commits < 100
    assert sorted(int(body) for body in bodies(read(tmp_path))) == list(range(500))


def test_a_reader_beside_the_writer_sees_each_commit_and_nothing_beyond(tmp_path: Path) -> None:
    async def go() -> None:
        journal = Journal(tmp_path, segment_bytes=10_000)
        reader = JournalReader(tmp_path)
        position, seen = 0, []
        for n in range(50):
            end = await journal.append(Kind.TRACES, b"%d" % n * 300)
            assert reader.committed() == end
            for record in reader.read_from(position):
                seen.append(record.body)
                position = record.end
            assert position == end
        assert seen == [b"%d" % n * 300 for n in range(50)]
        await asyncio.to_thread(journal.close)

    asyncio.run(go())


def test_a_torn_tail_is_cut_off_and_writing_goes_on_there(tmp_path: Path) -> None:
    ends = write(tmp_path, [b"one", b"two"])
    with open(segment_path(tmp_path, 0), "r+b") as file:
        file.seek(ends[-1])
        file.write(b"ALJ1" + random.Random(2).randbytes(500))  # a record whose rest never came
    assert write(tmp_path, [b"three"])[0] == ends[-1] + HEADER.size + 5
    assert bodies(read(tmp_path)) == [b"one", b"two", b"three"]


def test_every_single_torn_length_leaves_the_records_before_it(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    ends = write(folder, [b"first" * 3, b"second" * 3])
    data = segment_path(folder, 0).read_bytes()
    for cut in range(ends[0], ends[1]):
        torn = tmp_path / f"torn-{cut}"
        torn.mkdir()
        segment_path(torn, 0).write_bytes(data[:cut])
        (torn / "committed").write_bytes(ends[0].to_bytes(8, "little"))
        write(torn, [b"third"])
        assert bodies(read(torn)) == [b"first" * 3, b"third"]


@pytest.mark.parametrize("where", ["header", "length", "body"])
def test_a_flipped_record_is_quarantined_and_the_rest_is_read(tmp_path: Path, where: str) -> None:
    sent = [b"record %d" % n * 20 for n in range(10)]
    ends = write(tmp_path, sent)
    offset = ends[3] + {"header": 1, "length": 5, "body": HEADER.size + 7}[where]
    with open(segment_path(tmp_path, 0), "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))
    for _ in range(2):  # a restart changes nothing
        records = read(tmp_path)
        assert bodies(records) == sent[:4] + sent[5:]
        damaged = [record for record in records if record.kind is Kind.QUARANTINED]
        assert [(record.position, record.end) for record in damaged] == [(ends[3], ends[4])]
        write(tmp_path, [])
    kept = (tmp_path / "quarantine" / f"{ends[3]:016x}.bin").read_bytes()
    assert len(kept) == ends[4] - ends[3]


def test_a_damaged_last_record_that_was_committed_is_reported_not_forgotten(tmp_path: Path) -> None:
    ends = write(tmp_path, [b"one", b"two"])
    with open(segment_path(tmp_path, 0), "r+b") as file:
        file.seek(ends[0] + HEADER.size)
        file.write(b"X")
    write(tmp_path, [b"three"])
    records = read(tmp_path)
    assert bodies(records) == [b"one", b"three"]
    assert [record.kind for record in records] == [Kind.TRACES, Kind.QUARANTINED, Kind.TRACES]


def test_a_record_inside_a_body_is_not_taken_for_one(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(source, [b"smuggled"])
    inner = segment_path(source, 0).read_bytes()
    folder = tmp_path / "victim"
    ends = write(folder, [b"before", b"x" * 40 + inner + b"y" * 40, b"after"])
    with open(segment_path(folder, 0), "r+b") as file:
        file.seek(ends[0] + 5)
        file.write(b"\xff")
    assert bodies(read(folder)) == [b"before", b"after"]


def test_segments_below_the_low_watermark_are_removed_and_no_others(tmp_path: Path) -> None:
    async def go() -> None:
        journal = Journal(tmp_path, segment_bytes=4096)
        ends = [await journal.append(Kind.TRACES, bytes(1000)) for _ in range(40)]
        low = ends[20]
        assert journal.remove_below(low) > 0
        bases = segment_bases(tmp_path)
        assert bases[0] <= low < bases[1]
        assert journal.remove_below(ends[-1]) > 0
        assert len(segment_bases(tmp_path)) == 1
        await journal.append(Kind.TRACES, b"more")
        await asyncio.to_thread(journal.close)

    asyncio.run(go())
    assert bodies(read(tmp_path))[-1] == b"more"


def test_nothing_is_written_below_what_the_data_set_has_consumed(tmp_path: Path) -> None:
    write(tmp_path, [b"one"])
    assert write(tmp_path, [b"two"], start=10_000) == [10_000 + HEADER.size + 3]
    assert bodies(read(tmp_path, 10_000)) == [b"two"]
    assert bodies(read(tmp_path)) == [b"one", b"two"]


def test_damaged_files_never_stop_the_journal(tmp_path: Path) -> None:
    draw = random.Random(3)
    for case in range(30):
        folder = tmp_path / str(case)
        sent = [draw.randbytes(draw.randrange(200)) for _ in range(40)]
        write(folder, sent, segment_bytes=2048)
        path = segment_path(folder, draw.choice(segment_bases(folder)))
        data = bytearray(path.read_bytes())
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)
        write(folder, [b"afterwards"])
        records = read(folder)
        assert bodies(records)[-1] == b"afterwards"
        assert set(bodies(records)[:-1]) <= set(sent)
        lost = 40 - len(bodies(records)[:-1])
        assert lost <= 6
        assert bool(lost) == any(record.kind is Kind.QUARANTINED for record in records)


FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from agentlightning.collector.journal import Journal, JournalUnavailable, Kind

async def main() -> None:
    folder = Path(sys.argv[1])
    journal = Journal(folder, segment_bytes=4096)
    await journal.append(Kind.TRACES, b"kept" * 500)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        await journal.append(Kind.TRACES, b"refused" * 500)
    except JournalUnavailable as error:
        print("refused:", error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await journal.append(Kind.TRACES, b"again")
    await asyncio.to_thread(journal.close)

asyncio.run(main())
"""


def test_a_full_disk_refuses_and_when_there_is_room_it_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "refused: The journal at" in done.stdout
    assert bodies(read(tmp_path)) == [b"kept" * 500, b"again"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two MiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("a file system can only be mounted by root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_on_a_disk_that_fills_up_nothing_is_acknowledged_that_is_not_kept(tiny_disk: Path) -> None:
    sent = [b"%d" % n * 4000 for n in range(1000)]
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(1 << 20))

    async def go() -> list[bytes]:
        journal = Journal(tiny_disk / "journal", segment_bytes=128 << 10)
        kept = []
        for body in sent:
            try:
                await journal.append(Kind.TRACES, body)
            except JournalUnavailable:
                break
            kept.append(body)
        assert "cannot be written" in journal.failed
        for body in sent[:5]:  # and it stays so, without harm
            with pytest.raises(JournalUnavailable):
                await journal.append(Kind.TRACES, bytes(200_000) + body)
        ballast.unlink()
        for body in sent[-3:]:
            await journal.append(Kind.TRACES, body)
            kept.append(body)
        assert not journal.failed
        await asyncio.to_thread(journal.close)
        return kept

    kept = asyncio.run(go())
    assert len(kept) > 20
    assert bodies(read(tiny_disk / "journal")) == kept
    write(tiny_disk / "journal", [b"after a restart"], segment_bytes=64 << 10)
    assert bodies(read(tiny_disk / "journal")) == [*kept, b"after a restart"]


def test_a_segment_has_its_blocks_before_it_is_written(tmp_path: Path) -> None:
    async def go() -> None:
        journal = Journal(tmp_path, segment_bytes=1 << 20)
        for n in range(3):  # a sync need not write the file's size: it does not change
            await journal.append(Kind.TRACES, b"%d" % n * 1000)
            status = segment_path(tmp_path, 0).stat()
            assert status.st_size == 1 << 20
            assert status.st_blocks * 512 >= 1 << 20
        assert bodies(read(tmp_path)) == [b"0" * 1000, b"1" * 1000, b"2" * 1000]
        end = journal.end
        await asyncio.to_thread(journal.close)
        assert segment_path(tmp_path, 0).stat().st_size == end  # what was not needed is given back

    asyncio.run(go())


def test_a_closed_journal_refuses(tmp_path: Path) -> None:
    async def go() -> None:
        journal = Journal(tmp_path)
        await asyncio.to_thread(journal.close)
        with pytest.raises(JournalUnavailable):
            await journal.append(Kind.TRACES, b"late")

    asyncio.run(go())


def test_recovery_of_a_gigabyte_reads_only_the_last_segment(tmp_path: Path) -> None:
    size = 64 << 20
    write(tmp_path, [b"last"], start=16 * size)
    for index in range(16):  # sparse files stand for the gigabyte
        with open(segment_path(tmp_path, index * size), "wb") as file:
            os.truncate(file.fileno(), size)
    before = resource.getrusage(resource.RUSAGE_SELF)
    write(tmp_path, [b"more"])
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.5
    assert bodies(read(tmp_path, 16 * size)) == [b"last", b"more"]
