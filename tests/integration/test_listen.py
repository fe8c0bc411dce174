"""LISTEN: wakes, polls, reconnects, detects a frozen peer, and stops on request."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest

from queue_workflows.db import Listener, Wake
from tests.support import wait
from tests.support.proxy import Proxy

listen = importlib.import_module("queue_workflows.db.notifications")
LOST = "lost the LISTEN connection"
BACK = "the LISTEN connection is back"


class Heard:
    """A listener followed by a thread of its own."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._wakes: queue.Queue[Wake] = queue.Queue()
        self._thread = threading.Thread(target=self._follow, name="follow", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        for wake in self.listener:
            self._wakes.put(wake)

    def next(self, timeout_s: float = 15.0) -> Wake:
        """The next wake."""
        return self._wakes.get(timeout=timeout_s)

    def until(self, reason: str, timeout_s: float = 15.0) -> Wake:
        """The next wake for this reason."""
        deadline = time.monotonic() + timeout_s
        while True:
            wake = self.next(max(0.01, deadline - time.monotonic()))
            if wake.reason == reason:
                return wake

    def end(self) -> float:
        """Close the listener; the seconds until its iteration ended."""
        started = time.monotonic()
        self.listener.close()
        self._thread.join(30)
        assert not self._thread.is_alive()
        return time.monotonic() - started


@pytest.fixture
def follow(db: ModuleType, dsn: str) -> Generator[Callable[..., Heard]]:
    """Starts listeners, by default with a poll that never comes, and ends them."""
    heard: list[Heard] = []

    def start(*channels: str, **more: Any) -> Heard:
        given = {"poll_s": 60.0, "url": f"{dsn}&application_name=follower"} | more
        heard.append(Heard(db.listen(*channels, **given)))
        return heard[-1]

    yield start
    for one in heard:
        one.end()


def notify(conn: Any, channel: str, *texts: str) -> None:
    with conn.transaction():
        for text in texts:
            conn.execute("SELECT pg_notify(%s, %s)", (channel, text))


def kill_followers(conn: Any) -> None:
    conn.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'follower'"
    )


# --- wakes and polls ---------------------------------------------------------------------------


def test_it_yields_when_it_has_connected_and_what_is_notified(
    follow: Callable[..., Heard], conn: Any
) -> None:
    heard = follow("one", 'odd "channel"; --')
    assert heard.next() == Wake("connected")
    notify(conn, "one", "a", "a", "b")
    assert heard.next() == Wake("notify", frozenset({("one", "a"), ("one", "b")}))
    notify(conn, 'odd "channel"; --', "c")
    assert heard.next().notified == {('odd "channel"; --', "c")}
    notify(conn, "another", "d")
    notify(conn, "one", "e")
    assert heard.next().notified == {("one", "e")}


def test_it_polls_when_nothing_comes(follow: Callable[..., Heard]) -> None:
    heard = follow("one", poll_s=0.05)
    assert [heard.next().reason for _ in range(4)] == ["connected", "poll", "poll", "poll"]


def test_the_poll_interval_is_read_each_time(follow: Callable[..., Heard]) -> None:
    intervals = iter([0.01, 0.01, 0.01, 60.0, 60.0])
    heard = follow("one", poll_s=lambda: next(intervals))
    assert [heard.next().reason for _ in range(3)] == ["connected", "poll", "poll"]
    with pytest.raises(queue.Empty):
        heard.next(timeout_s=0.2)


def test_it_polls_however_much_is_notified(follow: Callable[..., Heard], conn: Any) -> None:
    heard = follow("one", poll_s=0.2)
    heard.until("connected")
    reasons: set[str] = set()
    deadline = time.monotonic() + 5
    while reasons != {"notify", "poll"} and time.monotonic() < deadline:
        notify(conn, "one", "again")
        reasons.add(heard.next().reason)
    assert reasons == {"notify", "poll"}


def test_wake_yields_at_once_and_wakes_before_the_iteration_count(
    follow: Callable[..., Heard], db: ModuleType, dsn: str
) -> None:
    heard = follow("one")
    heard.until("connected")
    heard.listener.wake()
    assert heard.next() == Wake("wake")
    early = db.listen("one", poll_s=60.0, url=dsn)
    early.wake()
    reasons: list[str] = []
    for wake in early:
        reasons.append(wake.reason)
        if len(reasons) == 2:
            early.close()
    assert sorted(reasons) == ["connected", "wake"]


# --- ends --------------------------------------------------------------------------------------


def test_close_from_another_thread_ends_the_iteration(follow: Callable[..., Heard]) -> None:
    heard = follow("one")
    heard.until("connected")
    assert heard.end() < 1
    assert list(heard.listener) == []
    heard.listener.close()
    heard.listener.wake()


def test_close_ends_an_iteration_that_waits_for_a_frozen_server(
    follow: Callable[..., Heard], dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "ANSWER_S", 2.0)
    with Proxy(dsn) as proxy:
        proxy.freeze()
        heard = follow("one", url=proxy.dsn)
        wait.until(lambda: proxy.connections > 0)
        assert heard.end() < 4


def test_it_can_be_iterated_again_after_its_consumer_stopped(db: ModuleType, dsn: str) -> None:
    listener = db.listen("one", url=dsn)
    for _ in range(2):
        assert next(iter(listener)).reason == "connected"
        gc.collect()
    listener.close()


def test_one_that_is_never_iterated_leaves_nothing_open(db: ModuleType) -> None:
    db.listen("one").close()
    db.listen("one").wake()
    gc.collect()


# --- loss --------------------------------------------------------------------------------------


def test_a_lost_connection_is_replaced_and_later_notifications_are_received(
    follow: Callable[..., Heard], conn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    heard = follow("one")
    heard.until("connected")
    for turn in range(3):
        with caplog.at_level(logging.WARNING):
            kill_followers(conn)
            heard.until("connected")
        notify(conn, "one", f"after {turn}")
        assert heard.until("notify").notified == {("one", f"after {turn}")}
    assert [caplog.text.count(text) for text in (LOST, BACK)] == [3, 3]


def test_after_a_reconnect_it_polls_for_missed_notifications(
    follow: Callable[..., Heard], conn: Any, dsn: str
) -> None:
    with Proxy(dsn) as proxy:
        heard = follow("one", url=proxy.dsn)
        heard.until("connected")
        proxy.cut()
        notify(conn, "one", "meanwhile")
        assert heard.until("connected") == Wake("connected")
        heard.end()


def test_it_continues_polling_and_logs_once_that_the_database_is_unreachable(
    follow: Callable[..., Heard], dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(dsn) as proxy:
        away = proxy.dsn
    with caplog.at_level(logging.WARNING):
        heard = follow("one", url=away, poll_s=0.2)
        assert {heard.next().reason for _ in range(5)} == {"poll"}
    assert caplog.text.count(LOST) == 1


def test_a_frozen_peer_is_noticed_left_and_found_again(
    follow: Callable[..., Heard],
    conn: Any,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listen, "PING_S", 0.1)
    monkeypatch.setattr(listen, "ANSWER_S", 1.0)
    with Proxy(dsn) as proxy, caplog.at_level(logging.WARNING):
        heard = follow("one", url=proxy.dsn)
        heard.until("connected")
        proxy.freeze()
        wait.until(lambda: "no answer within 1 s" in caplog.text)
        proxy.thaw()
        heard.until("connected")
        notify(conn, "one", "after")
        assert heard.until("notify").notified == {("one", "after")}
        heard.end()


def test_a_frozen_peer_is_noticed_within_15_seconds() -> None:
    assert listen.PING_S + listen.ANSWER_S <= 15


def test_a_quiet_connection_that_answers_its_pings_is_kept(
    follow: Callable[..., Heard],
    conn: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listen, "PING_S", 0.02)
    with caplog.at_level(logging.WARNING):
        heard = follow("one", poll_s=0.2)
        assert [heard.next().reason for _ in range(3)] == ["connected", "poll", "poll"]
        notify(conn, "one", "still")
        heard.until("notify")
    assert not caplog.records


def test_a_process_with_thousands_of_open_files_can_listen(
    follow: Callable[..., Heard], conn: Any
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (fd := os.open(os.devnull, os.O_RDONLY)) < 1100:
            stack.callback(os.close, fd)
        stack.callback(os.close, fd)
        heard = follow("one")
        heard.until("connected")
        notify(conn, "one", "a")
        heard.until("notify")
        heard.end()


def test_a_waiter_that_gets_no_thread_keeps_no_later_one_from_listening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []

    def start(follow: Any) -> None:
        started.append(follow)
        if len(started) == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(listen.service.Follow, "start", start)
    monkeypatch.setattr(listen.service.Follow, "stop", lambda *_: True)
    waiters = listen.Subscriptions("one")
    with pytest.raises(RuntimeError, match="new thread"), waiters.waking("a", bool):
        pass
    with waiters.waking("a", bool):
        pass
    assert len(started) == 2
