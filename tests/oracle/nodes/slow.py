"""Run for `secs` seconds, or until the cancel event is set."""

from tests.oracle.app import note


def run(tag, cancel_event, secs=4):
    note("slow", {"secs": secs})
    if cancel_event.wait(secs):
        return {"cancelled": True}
    return {"v": 1, "flag": True}
