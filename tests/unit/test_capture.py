"""The stored log of a handler: its size limit, storable text, and lines of that handler only."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from queue_workflows.engine import job_tables
from queue_workflows.worker import capture, recordings
from tests.support.wait import until


class Bodies:
    """A worker without a database: `lease` is the claim of the handler that runs."""

    def __init__(self) -> None:
        self.lease: job_tables.Lease | None = None
        self.source = capture.Source(lambda: self.lease)

    def begin(self, number: int) -> None:
        self.source.begin()
        self.lease = job_tables.Lease(job_tables.NODE_JOBS, "j", "w", number)

    def end(self) -> None:
        if self.lease is not None:
            self.source.end(self.lease)
        self.lease = None

    def __enter__(self) -> None:
        self._listening = self.source.capturing()
        self._listening.__enter__()

    def __exit__(self, *_: object) -> None:
        self._listening.__exit__(None, None, None)

    def text(self) -> str:
        """What is kept of the handler that runs, or ran last."""
        _, taken = self.source._take()
        return "".join((each.written().head or "") for each in taken)


@pytest.fixture
def bodies() -> Bodies:
    """Entered by the test itself: between set-up and test pytest puts its own streams back."""
    made = Bodies()
    made.source._store = made.source._store_last = lambda: None  # type: ignore[method-assign]
    made.begin(1)
    return made


def recorded(*parts: bytes, cap_kb: int = 1) -> tuple[str | None, str, int]:
    recording = recordings.Recording(job_tables.Lease(job_tables.NODE_JOBS, "j", "w", 1), cap_kb)
    for part in parts:
        recording.add(part)
    written = recording.written()
    return written.head, written.tail, written.cut_bytes


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
    recording = recordings.Recording(job_tables.Lease(job_tables.NODE_JOBS, "j", "w", 1), 1)
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
    recording = recordings.Recording(job_tables.Lease(job_tables.NODE_JOBS, "j", "w", 1), 1)
    recording.add(b"a" * 600)
    assert recording.written().head == "a" * 512
    recording.add(b"b")
    assert recording.written()[1:] == (None, "a" * 88 + "b", 0)
    recording.mark_unstored()
    assert recording.written().head == "a" * 512


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
    bodies = Bodies()
    with bodies.source.capturing():
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
        logging.getLogger("queue_workflows.engine.outcomes").warning("node n failed")
        assert bodies.text() == ""


def test_threads_that_a_handler_starts_belong_to_it(bodies: Bodies) -> None:
    with bodies:
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(print, "from a pool").result()
        assert bodies.text() == "from a thread\nfrom a pool\n"


def test_a_thread_that_a_handler_left_behind_prints_for_no_other(
    bodies: Bodies, capsys: pytest.CaptureFixture[str]
) -> None:
    go, said = threading.Event(), threading.Event()

    def late(*, first: str = "") -> None:
        if first:
            print(first)
        said.set()
        assert go.wait(30)
        print("late")
        logging.getLogger("host").warning("late")

    with bodies:
        context = contextvars.copy_context()
        threads = [
            threading.Thread(target=late),
            threading.Thread(target=late, kwargs={"first": "early"}),
            threading.Thread(target=context.run, args=(late,)),
        ]
        for thread in threads:
            thread.start()
        assert said.wait(30)
        until(lambda: bodies.text() == "early\n" or None)
        bodies.end()
        bodies.begin(2)
        print("mine")
        go.set()
        for thread in threads:
            thread.join()
        kept = [each.written().head for each in bodies.source._take()[1]]
        assert kept[-1] == "mine\n"
        assert "late" not in "".join(map(str, kept))


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


def test_two_workers_of_a_process_keep_their_own(bodies: Bodies) -> None:
    with bodies:
        other = Bodies()
        other.source._store = other.source._store_last = lambda: None  # type: ignore[method-assign]
        other.begin(1)
        ready, go = threading.Event(), threading.Event()

        def work() -> None:
            with other.source.capturing():
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


def test_between_handlers_nothing_is_kept(bodies: Bodies) -> None:
    with bodies:
        print("first")
        bodies.end()
        print("between")
        bodies.begin(2)
        print("second")
        _, taken = bodies.source._take()
        kept = [(each.lease.claim_no, each.written().head) for each in taken]
        assert kept == [(1, "first\n"), (2, "second\n")]


def test_a_silent_handler_leaves_nothing_to_do(bodies: Bodies) -> None:
    with bodies:
        assert bodies.source._take() == ([], [])
        print("one that speaks")
        bodies.end()
        assert len(bodies.source._take()[0]) == 1
        bodies.begin(2)
        bodies.end()
        assert bodies.source._take() == ([], [])


@pytest.mark.parametrize("knob", ["0", "-1"])
def test_the_knob_turns_it_off(monkeypatch: pytest.MonkeyPatch, knob: str) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_LOG_CAPTURE_KB", knob)
    before = sys.stdout
    bodies = Bodies()
    bodies.begin(1)
    with bodies.source.capturing():
        assert sys.stdout is before
        print("unheard")
    assert bodies.source._take() == ([], [])


def test_a_forked_child_keeps_nothing_and_takes_no_lock(bodies: Bodies) -> None:
    with bodies:
        print("parent")
        recording = bodies.source.recording()
        assert recording is not None
        reader, writer = os.pipe()
        held = threading.Event()
        leave = threading.Event()

        def hold() -> None:
            with recording._lock:
                held.set()
                leave.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(30)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                print("child")  # would wait for ever for a lock that its holder left in the parent
                os.write(writer, b"passed")
            os._exit(0)
        leave.set()
        thread.join()
        os.close(writer)
        with os.fdopen(reader) as answer:
            assert answer.read() == "passed"
        os.waitpid(pid, 0)
        assert bodies.text() == "parent\n"
