"""The registry of models: what may be registered, and what is found again."""

from __future__ import annotations

import threading
from decimal import Decimal
from typing import Any

import pytest

from queue_workflows import errors, model_registry
from queue_workflows.model_registry import ModelSpec
from tests.support import tabled


@pytest.fixture(autouse=True)
def _empty_registry():
    model_registry.clear_for_tests()
    yield
    model_registry.clear_for_tests()


def test_a_registered_spec_is_found_and_ids_are_sorted():
    sdxl = ModelSpec("sdxl", loader=object, unloader=print, est_vram_gb=12.5)
    model_registry.register(sdxl)
    model_registry.register(ModelSpec("llama", loader=object))

    assert model_registry.get("sdxl") is sdxl
    assert model_registry.known_ids() == ("llama", "sdxl")


def test_registering_an_id_again_replaces_it():
    model_registry.register(ModelSpec("sdxl", loader=object))
    newer = ModelSpec("sdxl", loader=dict)
    model_registry.register(newer)

    assert model_registry.get("sdxl") is newer
    assert model_registry.known_ids() == ("sdxl",)


def test_an_unknown_id_is_a_key_error_that_lists_the_known_ones():
    model_registry.register(ModelSpec("b-model", loader=object))
    model_registry.register(ModelSpec("a-model", loader=object))

    with pytest.raises(KeyError, match=r"'nope'.*a-model, b-model") as caught:
        model_registry.get("nope")
    assert isinstance(caught.value, errors.UnknownModel)
    with pytest.raises(errors.UnknownModel, match="; did you mean 'a-model'"):
        model_registry.get("a-modle")


def test_an_empty_registry_is_listed_as_none():
    with pytest.raises(errors.UnknownModel, match="registered are none"):
        model_registry.get("nope")


def test_a_spec_that_cannot_work_is_refused():
    cases: list[Any] = [
        ({"id": "", "loader": object}, "non-empty id"),
        ({"id": "m\x00", "loader": object}, "1 to 400 bytes"),
        ({"id": "\udcff", "loader": object}, "1 to 400 bytes"),
        ({"id": "m" * 401, "loader": object}, "1 to 400 bytes"),
        ({"id": 7, "loader": object}, "1 to 400 bytes"),
        ({"id": "m", "loader": None}, "loader"),
        ({"id": "m", "loader": object, "unloader": 3}, "unloader"),
        ({"id": "m", "loader": object, "est_vram_gb": -1}, "est_vram_gb"),
        ({"id": "m", "loader": object, "est_vram_gb": float("nan")}, "est_vram_gb"),
        ({"id": "m", "loader": object, "est_vram_gb": "24"}, "est_vram_gb"),
        ({"id": "m", "loader": object, "est_vram_gb": None}, "est_vram_gb"),
        ({"id": "m", "loader": object, "est_vram_gb": 10**400}, "est_vram_gb"),
    ]
    for kwargs, said in cases:
        with tabled.case(kwargs, said), pytest.raises(errors.InvalidConfig, match=said):
            ModelSpec(**kwargs)


def test_a_size_is_a_float_whatever_kind_of_number_was_given():
    spec = ModelSpec("m", object, est_vram_gb=Decimal("2.5"))
    assert type(spec.est_vram_gb) is float
    assert spec.est_vram_gb == 2.5


def test_threads_register_beside_each_other():
    def register_many(prefix: int) -> None:
        for number in range(100):
            model_registry.register(ModelSpec(f"{prefix}-{number}", loader=object))
            model_registry.known_ids()

    threads = [threading.Thread(target=register_many, args=(prefix,)) for prefix in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(model_registry.known_ids()) == 400
