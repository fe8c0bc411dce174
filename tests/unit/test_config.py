"""Names, hooks and settings are as documented, and wrong values are refused."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from queue_workflows import config, db, errors, refs
from tests.support import tabled

CONTRACT_KNOBS = {
    "DB_POOL_MAX": 10,
    "LEASE_RECLAIM_INTERVAL_S": 5.0,
    "STALE_WORKER_AFTER_S": 30.0,
    "DEAD_WORKER_SWEEP_INTERVAL_S": 5.0,
    "WATCHDOG_MAX_RETRIES": 3,
    "STALL_CONFIRM_SAMPLES": 3,
    "STALL_CONFIRM_POLL_S": 1.0,
    "GPU_HEALTH_INTERVAL_S": 300.0,
    "GPU_HEALTH_LOAD_GRACE_S": 1200.0,
    "GPU_IDLE_PCT": 5.0,
    "GPU_HEALTH_RAM_DELTA_MB": 5120,
    "GPU_MODEL_IDLE_TTL_S": 60.0,
    "WORKER_CONTROL_POLL_S": 5.0,
    "NODE_EVENT_RETENTION_DAYS": 30,
    "NODE_EVENT_PRUNE_INTERVAL_S": 3600.0,
    "NODE_POOL_RECOVERY_RETRIES": 5,
    "NODE_POOL_RECOVERY_BACKOFF_S": 2.0,
    "WORKFLOW_CPU_WORKERS": 5,
    "WORKFLOW_GPU_WORKERS": 1,
    "DISABLE_HW_METRICS": False,
    "DISABLE_WORKER_HEARTBEAT": False,
    "DISABLE_GPU_IDLE_REAPER": False,
    "DISABLE_WORKER_CONTROL": False,
}


# --- knobs -------------------------------------------------------------------------------------


def test_a_knob_of_the_contract_has_its_default() -> None:
    found = {name: config.KNOBS[name].read() for name in CONTRACT_KNOBS}
    assert found == CONTRACT_KNOBS


def test_our_variable_wins_over_the_apps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AI_LEADS_DB_POOL_MAX", "7")
    assert config.DB_POOL_MAX.read() == 7
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_POOL_MAX", "3")
    assert config.DB_POOL_MAX.read() == 3
    monkeypatch.delenv("QUEUE_WORKFLOWS_DB_POOL_MAX")
    monkeypatch.delenv("AI_LEADS_DB_POOL_MAX")
    assert config.DB_POOL_MAX.read() == 10


@pytest.mark.parametrize("raw", ["many", "", "1.5", "0x10"])
def test_a_value_that_does_not_parse_gives_the_default_and_one_warning(
    raw: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AI_LEADS_DB_POOL_MAX", raw)
    with caplog.at_level(logging.WARNING, "queue_workflows"):
        assert [config.DB_POOL_MAX.read() for _ in range(3)] == [10, 10, 10]
    assert len(caplog.records) == 1
    assert f"AI_LEADS_DB_POOL_MAX={raw!r}" in caplog.text


@pytest.mark.parametrize("raw", ["nan", "inf", "-inf", "5 s"])
def test_a_number_of_seconds_is_finite(raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", raw)
    assert config.CLAIM_POLL_S.read() == 1.0


@pytest.mark.parametrize(("raw", "found"), [("1", True), ("0", True), ("no", True), ("", False)])
def test_a_flag_is_set_and_not_empty(
    raw: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AI_LEADS_DISABLE_HW_METRICS", raw)
    assert config.DISABLE_HW_METRICS.read() is found


@pytest.mark.parametrize("raw", ["0", "-1"])
def test_no_setting_lets_a_loop_poll_without_a_pause(
    raw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for knob in (config.CLAIM_POLL_S, config.DL_HEARTBEAT_SEC, config.WORKER_CONTROL_POLL_S):
        monkeypatch.setenv(knob.variables[0], raw)
        assert knob.read() == config.LEAST_POLL_S
        monkeypatch.setenv(knob.variables[0], "0.5")
        assert knob.read() == 0.5


def test_every_knob_is_described_with_its_variables() -> None:
    assert all(knob.name == name for name, knob in config.KNOBS.items())
    assert all(knob.meaning and knob.unit for knob in config.KNOBS.values())
    assert config.DB_POOL_MAX.variables == ("QUEUE_WORKFLOWS_DB_POOL_MAX", "AI_LEADS_DB_POOL_MAX")


# --- configure ---------------------------------------------------------------------------------


def test_the_defaults_are_the_contracts() -> None:
    found = config.get_config()
    assert found.db_url_env == "AI_LEADS_DB_URL"
    assert found.host_label_env == "AI_LEADS_HOST_LABEL"
    assert found.host_priority_env == "AI_LEADS_GPU_CONSUMER_PRIORITY"
    assert found.container_prefix == "ai_leads-"
    assert found.ingest_queues == {"fetch", "load"}
    assert found.ingest_default_budget_s == 3600
    assert not found.video_model_ids
    assert not found.ingest_task_map
    assert not found.ingest_schedule
    for hook in (
        "node_module_package", "node_resolver", "workflow_loader", "pipeline_schema_loader",
        "resolve_ref", "invoke_context",
    ):  # fmt: skip
        assert getattr(found, hook) is None
    found.builtin_model_registrar()
    assert found.get_resolve_ref() is refs.resolve_ref


def test_configure_takes_keywords_only() -> None:
    parameters = inspect.signature(config.configure).parameters
    assert list(parameters) == [
        "db_url_env", "video_model_ids", "node_module_package", "host_label_env",
        "host_priority_env", "container_prefix", "ingest_queues", "ingest_default_budget_s",
        "embedded", "app_name",
    ]  # fmt: skip
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())


def test_configure_changes_only_what_is_passed_and_may_be_called_again() -> None:
    first = config.configure(container_prefix="mine-", ingest_queues=["flood"])
    second = config.configure(ingest_default_budget_s=60, video_model_ids=["v"])
    assert first is second is config.get_config()
    assert second.container_prefix == "mine-"
    assert second.ingest_queues == {"flood"}
    assert second.ingest_default_budget_s == 60
    assert second.video_model_ids == {"v"}
    assert second.db_url_env == "AI_LEADS_DB_URL"


def test_embedded_none_means_as_it_was() -> None:
    assert config.configure(embedded=True).embedded is True
    assert config.configure().embedded is True
    assert config.configure(embedded=False).embedded is False


def test_bad_ingest_queues_change_nothing() -> None:
    cases: list[Any] = [
        ["cpu"],
        ["fetch", "gpu"],
        "fetch",
        ["with space"],
        [""],
        [".dot"],
        ["q" * 64],
        ["fetch", 5],
    ]
    for queues in cases:
        with tabled.case(queues):
            with pytest.raises(ValueError, match=r"ingest_queues|queue name"):
                config.configure(container_prefix="mine-", ingest_queues=queues)  # pyright: ignore
            assert config.get_config().ingest_queues == {"fetch", "load"}
            assert config.get_config().container_prefix == "ai_leads-"


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_that_is_not_positive_changes_nothing(budget: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        config.configure(container_prefix="mine-", ingest_default_budget_s=budget)
    assert config.get_config().container_prefix == "ai_leads-"


def test_queue_names_with_dots_are_fine() -> None:
    config.configure(ingest_queues=["load.cbr"])
    config.check_queue("load.cbr")
    assert config.queues() == {"cpu", "gpu", "load.cbr"}


def test_an_unknown_queue_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'nope': known are cpu, fetch, gpu, load") as caught:
        config.check_queue("nope")
    assert isinstance(caught.value, errors.UnknownQueue)
    with pytest.raises(errors.UnknownQueue, match=r"; did you mean 'fetch'\?$"):
        config.check_queue("fecth")


def test_reset_restores_every_default() -> None:
    config.configure(db_url_env="X", ingest_queues=["a"], embedded=True)
    config.register_node("n", dict)
    config.register_ingest_task("t", lambda reason: {})
    config.set_node_resolver(lambda name: None)
    config.reset_for_tests()
    test_the_defaults_are_the_contracts()
    assert not config.get_config().knows_nodes()
    assert config.db_url_variables() == ("QUEUE_WORKFLOWS_DB_URL", "AI_LEADS_DB_URL")


# --- the DSN -----------------------------------------------------------------------------------


def test_the_dsn_is_ours_then_the_apps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.database_url() is None
    monkeypatch.setenv("AI_LEADS_DB_URL", "postgresql://theirs")
    assert config.database_url() == "postgresql://theirs"
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://ours")
    assert config.database_url() == "postgresql://ours"


def test_a_variable_that_the_app_named_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://ours")
    monkeypatch.setenv("AI_LEADS_DB_URL", "postgresql://theirs")
    config.configure(db_url_env="HOST_DB")
    assert config.database_url() is None
    monkeypatch.setenv("HOST_DB", "postgresql://host")
    assert config.database_url() == "postgresql://host"
    config.configure(db_url_env="AI_LEADS_DB_URL")
    assert config.database_url() == "postgresql://theirs"


def test_no_dsn_is_refused_with_the_variable_and_the_way_to_the_embedded_server() -> None:
    with pytest.raises(errors.DatabaseUrlMissing) as caught:
        db.db_url()
    for part in (
        "QUEUE_WORKFLOWS_DB_URL", "AI_LEADS_DB_URL", "--embedded", "configure(embedded=True)",
        "QUEUE_WORKFLOWS_EMBEDDED=1",
    ):  # fmt: skip
        assert part in str(caught.value)
    config.configure(db_url_env="HOST_DB")
    with pytest.raises(errors.DatabaseUrlMissing, match="set HOST_DB to"):
        db.db_url()


def test_an_empty_dsn_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "")
    monkeypatch.setenv("AI_LEADS_DB_URL", "postgresql://theirs")
    assert config.database_url() == "postgresql://theirs"


def test_the_embedded_server_is_wanted_by_configure_or_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not config.embedded_wanted()
    monkeypatch.setenv("QUEUE_WORKFLOWS_EMBEDDED", "1")
    assert config.embedded_wanted()
    monkeypatch.delenv("QUEUE_WORKFLOWS_EMBEDDED")
    config.configure(embedded=True)
    assert config.embedded_wanted()


@pytest.mark.parametrize("label", ["b\udcff", "b" * 401])
def test_a_host_label_that_no_row_can_hold_is_refused(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_HOST_LABEL", label)
    with pytest.raises(errors.InvalidConfig, match="QUEUE_WORKFLOWS_HOST_LABEL='b"):
        config.host_label()


def test_the_host_label_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.host_label()
    monkeypatch.setenv("AI_LEADS_HOST_LABEL", "theirs")
    assert config.host_label() == "theirs"
    monkeypatch.setenv("QUEUE_WORKFLOWS_HOST_LABEL", "ours")
    assert config.host_label() == "ours"
    monkeypatch.setenv("MY_LABEL", "named")
    config.configure(host_label_env="MY_LABEL")
    assert config.host_label() == "named"


@pytest.mark.parametrize(("raw", "found"), [("-1", -1), ("2", 2), ("soon", 0)])
def test_the_host_priority_comes_from_the_environment(
    raw: str, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AI_LEADS_GPU_CONSUMER_PRIORITY", raw)
    assert config.host_priority() == found


# --- node modules ------------------------------------------------------------------------------


def test_without_package_or_resolver_only_registered_names_resolve() -> None:
    sys.modules.pop("cProfile", None)
    for name in ("cProfile", "os", "queue_workflows.config", "json"):
        with pytest.raises(errors.NodeNotFound, match="not registered"):
            config.get_config().resolve_node_module(name)
    assert "cProfile" not in sys.modules
    module = ModuleType("m")
    module.run = dict  # pyright: ignore
    config.register_node("mine", module)
    assert config.get_config().resolve_node_module("mine") is module


@pytest.mark.parametrize("place", [dict, (), ([],), 5])
def test_a_node_module_may_have_a_place_of_its_own(place: Any) -> None:
    module = ModuleType("arm")
    module.run, module.place = dict, place  # pyright: ignore
    config.register_node("arm", module)
    with pytest.raises(errors.NodeNotFound, match="did you mean 'arm'"):
        config.get_config().resolve_node_module("arms")


def test_a_plain_callable_is_registered_as_a_module_with_run() -> None:
    def body() -> dict[str, int]:
        return {"a": 1}

    config.register_node("n", body)
    assert config.get_config().resolve_node_module("n").run is body
    with pytest.raises(ValueError, match="neither callable"):
        config.register_node("bad", 7)


def test_a_package_holds_its_names_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "hostnodes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text("def run(): return {}\n")
    (package / "broken.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config.set_node_module_package("hostnodes")
    resolve = config.get_config().resolve_node_module
    assert resolve("good").__name__ == "hostnodes.good"
    for name in ("missing", "good.deeper", "..os", ".good", "os/path", "", "good;import os", "1x"):
        with pytest.raises(errors.NodeNotFound):
            resolve(name)
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        resolve("broken")


def test_a_registered_name_wins_over_the_resolver_and_that_over_the_package() -> None:
    own, theirs = SimpleNamespace(run=print), SimpleNamespace(run=print)
    config.set_node_module_package("json")
    config.set_node_resolver(lambda name: theirs)
    config.register_node("decoder", own)
    assert config.get_config().resolve_node_module("decoder") is own
    assert config.get_config().resolve_node_module("encoder") is theirs


def test_what_a_resolver_raises_for_a_name_that_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "resolved_nodes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lacks.py").write_text("import nothing_of_this_name\n")
    (package / "broken.py").write_text("{}['key']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lookups: dict[str, Callable[[str], Any]] = {
        "imports": lambda name: importlib.import_module("resolved_nodes." + name),
        "no parent": lambda name: importlib.import_module("nothing_of_this_name." + name),
        "dict": lambda name: {}[name],
        "getattr": lambda name: getattr(SimpleNamespace(), name),
        "file": lambda name: (package / f"{name}.py").read_text(),
    }
    resolve = config.get_config().resolve_node_module
    for own in lookups.values():
        config.set_node_resolver(own)
        with pytest.raises(errors.NodeNotFound, match="does not know node module 'missing'"):
            resolve("missing")
    config.set_node_resolver(lookups["imports"])
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        resolve("lacks")
    with pytest.raises(KeyError, match="key"):
        resolve("broken")
    config.set_node_resolver(lambda name: name.nodes)  # pyright: ignore
    with pytest.raises(AttributeError, match="nodes"):
        resolve("missing")


# --- hooks and the app -------------------------------------------------------------------------


def test_hooks_are_readable_where_apps_read_them() -> None:
    def anything(*_: object) -> None:
        return

    config.set_workflow_provider(anything, anything, resolve_ref=anything)  # pyright: ignore
    config.set_invoke_context(anything)  # pyright: ignore
    config.set_builtin_model_registrar(anything)
    config.register_ingest_task("t", anything)
    config.set_ingest_schedule(iter([1, 2]))
    config.register_input_widget("w", anything)  # pyright: ignore
    config.set_on_node_completed(anything)
    found = config.get_config()
    assert found.workflow_loader is found.pipeline_schema_loader is anything
    assert found.get_resolve_ref() is anything
    assert found.invoke_context is found.builtin_model_registrar is anything
    assert found.ingest_task_map == {"t": anything}
    assert found.ingest_schedule == [1, 2]
    assert found.input_widgets == {"w": anything}
    assert found.on_node_completed is anything
    config.set_workflow_provider(anything, anything)  # pyright: ignore
    assert found.get_resolve_ref() is refs.resolve_ref


def test_an_ingest_task_must_be_callable() -> None:
    with pytest.raises(ValueError, match="'t' is not callable"):
        config.register_ingest_task("t", 7)  # pyright: ignore


def test_an_unknown_queue_is_refused_with_a_remedy_where_there_is_one() -> None:
    with pytest.raises(errors.UnknownQueue, match=r"known are cpu, fetch, gpu, load; configure"):
        config.check_queue("nope")
    with pytest.raises(errors.UnknownQueue, match=r"^unknown queue 'fetch': known are cpu, gpu$"):
        config.check_queue("fetch", config.DAG_QUEUES)
