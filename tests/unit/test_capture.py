"""The stored log of a handler: its size limit, storable text, and lines of that handler only."""

from __future__ import annotations

import logging
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from queue_workflows.claim import job_tables
from queue_workflows.run import job_output
from queue_workflows.worker import job_logs


class Bodies:
    """A thread that runs handlers; `said` has what each of them printed."""

    def __init__(self) -> None:
        self.said: list[str] = []
        output = job_output.JobOutput(lambda: int(self.runs), self._send, takes_bytes=True)
        self._block = job_output.captured(output)
        self.runs = True

    def _send(self, _: int, record: dict[str, Any]) -> None:
        self.said[-1] += record["text"] + "\n"

    def begin(self) -> None:
        self.said.append("")
        self.runs = True

    def end(self) -> None:
        self.runs = False

    def __enter__(self) -> None:
        self._block.__enter__()

    def __exit__(self, *_: object) -> None:
        self._block.__exit__(None, None, None)

    def text(self) -> str:
        """What the handler printed that runs, or ran last."""
        return self.said[-1]


@pytest.fixture
def bodies() -> Bodies:
    """Entered by the test itself: between set-up and test pytest puts its own streams back."""
    made = Bodies()
    made.begin()
    return made


def recorded(*parts: bytes, cap_kb: int = 1) -> tuple[str | None, str, int]:
    recording = job_logs.Recording(job_tables.Lease(job_tables.NODE_JOBS, "j", "w", 1), cap_kb)
    for part in parts:
        recording.add(part)
    return recording.written()


def test_what_fits_is_kept_whole() -> None:
    assert recorded(b"one\n", b"two\n") == ("one\ntwo\n", "", 0)
    assert recorded(b"a" * 1024) == ("a" * 512, "a" * 512, 0)


@pytest.mark.parametrize("piece", [1, 100, 700, 5000])
def test_of_a_longer_log_the_head_and_the_tail_are_stored(piece: int) -> None:
    whole = b"".join(b"%07d\n" % n for n in range(1000))
    parts = [whole[at : at + piece] for at in range(0, len(whole), piece)]
    head, tail, cut = recorded(*parts)
    assert (head, tail) == (whole[:512].decode(), whole[-512:].decode())
    assert cut == len(whole) - 1024


def test_memory_stays_within_the_cap() -> None:
    recording = job_logs.Recording(job_tables.Lease(job_tables.NODE_JOBS, "j", "w", 1), 1)
    for _ in range(1000):
        recording.add(b"x" * 1000)
        assert len(recording._head) + len(recording._tail) <= 3 * 1024


def test_what_is_kept_can_be_stored() -> None:
    head, _, _ = recorded(b"nul \0 lone ", "\ud800".encode("utf-8", "backslashreplace"))
    assert head == "nul \N{REPLACEMENT CHARACTER} lone \\ud800"
    head, tail, _ = recorded("ä".encode() * 2000 + b"z")
    assert set((head or "") + tail) == {"ä", "z"}


def test_passwords_of_dsns_are_masked() -> None:
    assert recorded(b"postgresql://me:secret@box/db")[0] == "postgresql://me:***@box/db"


def test_a_head_that_is_stored_is_not_sent_again() -> None:
    recording = job_logs.Recording(job_tables.Lease(job_tables.NODE_JOBS, "j", "w", 1), 1)
    recording.add(b"a" * 600)
    assert recording.written()[0] == "a" * 512
    recording.add(b"b")
    assert recording.written() == (None, "a" * 88 + "b", 0)
    recording.mark_unstored()
    assert recording.written()[0] == "a" * 512


def test_print_stderr_and_logging_are_kept_and_go_on(
    bodies: Bodies, capsys: pytest.CaptureFixture[str]
) -> None:
    with bodies:
        print("out")
        print("err", file=sys.stderr)
        sys.stdout.buffer.write(b"raw")
        sys.stdout.buffer.writelines([b"\n"])
        sys.stdout.writelines(["l1\n", "l2\n"])
        logging.getLogger("host.part").warning("careful %d", 7)
        lines = bodies.text().splitlines()
        assert [lines[0], lines[1], *lines[2:5]] == ["out", "err", "raw", "l1", "l2"]
        assert lines[5].endswith("Z WARNING host.part: careful 7")
        assert len(lines) == 6


def test_the_streams_are_given_back() -> None:
    before = sys.stdout, sys.stderr, logging.getLogRecordFactory()
    with Bodies():
        assert sys.stdout is not before[0]
        assert sys.stdout.encoding == before[0].encoding
    assert (sys.stdout, sys.stderr, logging.getLogRecordFactory()) == before


def test_a_record_that_is_printed_is_kept_once(bodies: Bodies) -> None:
    with bodies:
        logger = logging.getLogger("host.printing")
        logger.propagate = False
        handler = logging.StreamHandler()  # to the stderr of now, which is kept
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            logger.info("quiet")
            logger.warning("loud")
        finally:
            logger.removeHandler(handler)
            logger.propagate = True
        lines = bodies.text().splitlines()
        assert lines[0].endswith("INFO host.printing: quiet")
        assert lines[1:] == ["loud"]


def test_the_handler_of_last_resort_stays_what_it_is(
    bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bodies:
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        logging.getLogger("host").warning("nobody set up logging")
        assert bodies.text() == "nobody set up logging\n"


def test_log_lines_of_the_engine_are_left_out(bodies: Bodies) -> None:
    with bodies:
        logging.getLogger("queue_workflows.claim.outcomes").warning("node n failed")
        assert bodies.text() == ""


def test_threads_that_a_handler_starts_belong_to_it(bodies: Bodies) -> None:
    with bodies:
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(print, "from a pool").result()
        assert bodies.text() == "from a thread\nfrom a pool\n"


DSN = b"postgresql://me:correct-horse-battery@box/db"


@pytest.mark.parametrize("mark", [b"\n", b" ", b"x"])
def test_no_cut_goes_through_a_password(mark: bytes) -> None:
    for before in range(440, 520):
        for whole in (
            mark * before + DSN + mark * 100,
            mark * before + DSN + mark * 3000,
            mark * 3000 + DSN + mark * before,
        ):
            head, tail, cut = recorded(whole)
            text = f"{head}{'#' if cut else ''}{tail}"
            assert not any(part in text for part in ("corr", "orse", "tery", "horse", "batt")), text


@pytest.mark.parametrize("mark", [b"\n", b" ", b"x"])
def test_the_last_lines_show_no_part_of_a_password(mark: bytes) -> None:
    for before in range(job_logs.LAST_BYTES - 60, job_logs.LAST_BYTES + 20):
        recording = job_logs.Recording(job_tables.Lease(job_tables.NODE_JOBS, "j", "w", 1), 64)
        recording.add(b"early\n" * 9000 + DSN + mark * before)
        text = "\n".join(recording.last_lines)
        assert not any(part in text for part in ("corr", "orse", "tery", "horse", "batt")), text


def test_the_last_lines_are_those_of_the_whole_log() -> None:
    recording = job_logs.Recording(job_tables.Lease(job_tables.NODE_JOBS, "j", "w", 1), 64)
    recording.add(b"one\ntwo\n")
    assert recording.last_lines == ["one", "two"]
    recording.add(b"".join(b"line %d\n" % number for number in range(20_000)))
    assert recording.last_lines == [f"line {number}" for number in range(19_995, 20_000)]


def test_two_workers_of_a_process_keep_their_own(bodies: Bodies) -> None:
    with bodies:
        other, ready, go = Bodies(), threading.Event(), threading.Event()
        other.begin()

        def work() -> None:
            with other:
                ready.set()
                assert go.wait(30)
                print("other")

        thread = threading.Thread(target=work)
        thread.start()
        assert ready.wait(30)
        print("mine")
        go.set()
        thread.join()
        print("mine again")
        assert (bodies.text(), other.text()) == ("mine\nmine again\n", "other\n")


class Logs:
    """The logs of a worker, and when they are to be stored."""

    def __init__(self) -> None:
        self.now = 0.0
        self.logs = job_logs.JobLogs(lambda _: None, lambda: self.now)

    def job(self, number: int) -> Any:
        return SimpleNamespace(lease=job_tables.Lease(job_tables.NODE_JOBS, "j", "w", number))

    def taken(self) -> list[tuple[int, str | None]]:
        return [(each.lease.claim_no, each.written()[0]) for each in self.logs.take()]


def test_a_log_is_stored_after_a_while_and_at_the_end_of_its_handler() -> None:
    found = Logs()
    assert found.logs.store_at == math.inf
    found.logs.add(found.job(1), b"x")
    assert found.logs.store_at == job_logs.STORE_S
    found.logs.end(found.job(1))
    assert found.logs.store_at == 0.0
    assert found.taken() == [(1, "x")]


def test_logs_of_handlers_that_end_one_after_the_other_share_statements() -> None:
    found = Logs()
    for number in (1, 2, 3):
        found.logs.add(found.job(number), b"x")
        found.logs.end(found.job(number))
        if number == 1:
            found.taken()
            found.logs.store_at = math.inf
    assert found.logs.store_at == job_logs.BETWEEN_S
    assert found.taken() == [(2, "x"), (3, "x")]


@pytest.mark.parametrize("knob", ["0", "-1"])
def test_the_knob_turns_it_off(monkeypatch: pytest.MonkeyPatch, knob: str) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_LOG_CAPTURE_KB", knob)
    found = Logs()
    found.logs.add(found.job(1), b"unheard")
    found.logs.end(found.job(1))
    assert (found.taken(), found.logs.store_at) == ([], math.inf)
