"""Report progress in each form, and return what the engine offers."""

from tests.oracle.app import note


def run(
    status_callback, cancel_event, tag=None, model_load_seconds=-1, model_handle="none", inputs=None
):
    note("cb", inputs)
    for given in ((), (0.5,), ({"p": 1},), ("text",)):
        status_callback(*given)
    return {"mls": type(model_load_seconds).__name__, "mh": model_handle, "v": 1}
