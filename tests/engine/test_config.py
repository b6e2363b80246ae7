from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pega_omni_plugin.engine.config import (
    PROFILES,
    PROGRAMS,
    STAGE_CONFIGS,
    ConfigError,
    EngineConfig,
    find_stage_file,
    is_program_file,
    load_stage_file,
    make_front,
    parse_engine,
    parse_options,
    program_class,
)
from pega_omni_plugin.engine.program import PartConfig
from pega_omni_plugin.models.sim.program import SimOptions, SimProgram
from pega_omni_plugin.registration import PIPELINES

OURS = sorted(path for path in STAGE_CONFIGS.glob("*.yaml") if is_program_file(path))
STAGE: dict[str, Any] = {"stage_id": 0, "additional_config": {"program": "sim"}}


def write(folder: Path, document: Any, name: str = "stage.yaml") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        load_stage_file(path)
    assert str(raised.value).startswith(str(path.resolve())) or str(raised.value).startswith(str(path))
    return str(raised.value)


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_packaged_stage_files_are_right(path: Path) -> None:
    from vllm_omni.config.stage_config import resolve_deploy_yaml

    assert PIPELINES[resolve_deploy_yaml(path)["pipeline"]] == load_stage_file(path).program


def test_each_program_has_a_stage_file_a_pipeline_and_a_name_that_files_may_use() -> None:
    assert {load_stage_file(path).program for path in OURS} == set(PROGRAMS)
    assert set(PIPELINES.values()) == set(PROGRAMS)
    assert set(get_args(EngineConfig.model_fields["program"].annotation)) == set(PROGRAMS)


def test_program_names_lead_to_programs() -> None:
    assert program_class("sim") is SimProgram


def test_a_named_profile_holds_unless_the_file_spells_its_own_out() -> None:
    assert parse_engine({"program": "sim"}, "x").chunk_profile == PROFILES["balanced"]
    assert parse_engine({"program": "sim", "profile": "ttfa"}, "x").chunk_profile == PROFILES["ttfa"]
    own = parse_engine({"program": "sim", "profile": "ttfa", "chunks": {"first": 3, "steady": 5}}, "x").chunk_profile
    assert (own.first, own.steady) == (3, 5)


def test_parts_and_options_become_their_types() -> None:
    config = parse_engine(
        {"program": "sim", "parts": {"decoder": {"device": "cuda:1"}}, "options": {"frame_rate": 25}}, "x"
    )
    assert config.parts == {"decoder": PartConfig(device="cuda:1")}
    assert parse_options(config) == SimOptions(frame_rate=25.0)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "program: Field required"),
        ({"program": "simm"}, "'sim', 'piper' or 'qwen3_tts' (got 'simm')"),
        ({"program": "sim", "queu": 3}, "unknown key 'queu'; known: chunks, options, parts"),
        ({"program": "sim", "slots": 0}, "slots: Input should be greater than or equal to 1 (got 0)"),
        ({"program": "sim", "slots": 4097}, "slots: Input should be less than or equal to 4096 (got 4097)"),
        ({"program": "sim", "queue": -1}, "queue: "),
        ({"program": "sim", "prompt_budget": 0}, "prompt_budget: "),
        ({"program": "sim", "stall_seconds": 0}, "stall_seconds: "),
        ({"program": "sim", "request_seconds": -1}, "request_seconds: "),
        ({"program": "sim", "profile": "fast"}, "profile: Input should be 'ttfa', 'balanced' or 'throughput'"),
        ({"program": "sim", "chunks": {"first": 1}}, "chunks.steady: Field required"),
        ({"program": "sim", "chunks": {"first": 0, "steady": 1}}, "chunks.first: "),
        (
            {"program": "sim", "chunks": {"first": 1, "steady": 1, "z": 1}},
            "unknown key 'chunks.z'; known: first, steady",
        ),
        ({"program": "sim", "parts": {"vocoder": {}}}, "'thinker', 'codec' or 'decoder' (got 'vocoder')"),
        (
            {"program": "sim", "parts": {"codec": {"devise": "cpu"}}},
            "unknown key 'parts.codec.devise'; known: device, dtype, graphs",
        ),
        ({"program": "sim", "parts": {"codec": {"dtype": "float16"}}}, "parts.codec.dtype: Input should be 'auto', "),
        ({"program": "sim", "options": {"rate": 1}}, "unknown key 'rate'; known: frame_rate, frames"),
        ({"program": "sim", "options": {"max_frames": "many"}}, ".options: max_frames: "),
        ({"program": "sim", "options": {"frame_rate": 0}}, "frame_rate must be a number from 0.001"),
        ({"program": "sim", "options": {"frame_rate": float("inf")}}, "frame_rate must be"),
        ({"program": "sim", "options": []}, "options: "),
    ],
)
def test_each_wrong_key_is_named_with_what_is_allowed(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_engine(section, "stages[0]")
    assert str(raised.value).startswith("stages[0]")
    assert said in str(raised.value)


def test_a_part_of_which_nothing_is_said_chooses_for_itself() -> None:
    assert parse_engine({"program": "sim", "parts": {"codec": {}}}, "x").parts == {
        "codec": PartConfig(device="auto", dtype="auto", graphs=True)
    }


def test_a_front_that_an_engine_describes_with_wrong_options_is_refused_by_name() -> None:
    described = {"program": "sim", "options": {"rate": 1}, "checkpoint": "models/sim"}
    with pytest.raises(ConfigError, match="options: unknown key 'rate'"):
        make_front(described, SimProgram(SimOptions()).info)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"slots: .*; unknown key 'quue'"):
        parse_engine({"program": "sim", "slots": 0, "quue": 1}, "x")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5000) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=2),
    max_leaves=4,
)
KEYS = [*EngineConfig.model_fields, "other"]


@given(
    section=st.dictionaries(st.sampled_from(KEYS), VALUES),
    options=st.dictionaries(st.sampled_from([*SimOptions.__dataclass_fields__, "other"]), VALUES, max_size=3),
)
def test_any_section_is_either_right_or_refused_by_name(section: dict[str, Any], options: dict[str, Any]) -> None:
    try:
        config = parse_engine({"program": "sim", "options": options} | section, "here")
    except ConfigError as error:
        assert str(error).startswith("here")
    else:
        assert parse_options(config).frame_samples >= 1


def test_a_stage_file_stands_on_its_base(tmp_path: Path) -> None:
    write(tmp_path, {"pipeline": "pega_sim", "stages": [STAGE | {"max_num_seqs": 7}]}, "base.yaml")
    stage = {"stage_id": 0, "additional_config": {"program": "sim", "slots": 9}}
    assert load_stage_file(write(tmp_path, {"base_config": "base.yaml", "stages": [stage]})).slots == 9


def test_our_section_replaces_that_of_the_base_whole(tmp_path: Path) -> None:
    """As vLLM-Omni does it: what is checked here is what the engine gets."""
    write(tmp_path, {"stages": [{"stage_id": 0, "additional_config": {"program": "sim", "queue": 3}}]}, "base.yaml")
    over = write(tmp_path, {"base_config": "base.yaml", "stages": [STAGE]})
    assert load_stage_file(over).queue == EngineConfig.model_fields["queue"].default


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_vllm_omni_reads_the_same_from_our_files(path: Path) -> None:
    from vllm_omni.config.stage_config import resolve_deploy_yaml

    (stage,) = resolve_deploy_yaml(path)["stages"]
    assert parse_engine(stage["additional_config"], "x") == load_stage_file(path)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("a: [", "not YAML"),
        ("- 1", "expected a mapping at the top, got list"),
        ("", "expected a mapping at the top, got NoneType"),
        ({"stage": []}, "unknown key 'stage'; known: async_chunk, base_config"),
        ({"stages": 3}, "stages: expected a list of mappings"),
        ({"stages": [3]}, "stages: expected a list of mappings"),
        ({}, "stages: a program runs in one stage, found 0"),
        ({"stages": [STAGE, STAGE | {"stage_id": 1}]}, "stages: a program runs in one stage, found 2"),
        ({"stages": [{"additional_config": {}}]}, "stages[0].stage_id: expected a number, got None"),
        ({"stages": [STAGE | {"devics": "0"}]}, "stages[0]: unknown key 'devics'"),
        ({"stages": [{"stage_id": 0}]}, "stages[0].additional_config: program: Field required"),
        ({"stages": [{"stage_id": 0, "additional_config": 3}]}, "stages[0].additional_config: "),
        ({"stages": [STAGE], "model_runner": "v2"}, "model_runner: programs run under v1, got 'v2'"),
        ({"stages": [STAGE], "base_config": 5}, "base_config: expected the name of a file, got 5"),
        ({"stages": [STAGE], "base_config": "stage.yaml"}, "base_config leads back to this file"),
    ],
)
def test_a_wrong_stage_file_is_refused_by_name_and_key(tmp_path: Path, document: Any, said: str) -> None:
    assert said in refusal(write(tmp_path, document))


def test_files_that_name_each_other_as_base_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"base_config": "other.yaml"})
    write(tmp_path, {"base_config": "stage.yaml"}, "other.yaml")
    assert "base_config leads back to this file" in refusal(path)


def test_a_wrong_key_in_a_base_names_the_base(tmp_path: Path) -> None:
    base = write(tmp_path, {"nonsense": 1}, "base.yaml")
    with pytest.raises(ConfigError, match=f"^{base}: unknown key 'nonsense'"):
        load_stage_file(write(tmp_path, {"base_config": "base.yaml"}))


@pytest.mark.parametrize("reader", [load_stage_file, is_program_file])
def test_what_cannot_be_read_is_named(tmp_path: Path, reader: Any) -> None:
    missing, binary = tmp_path / "missing.yaml", tmp_path / "binary.yaml"
    binary.write_bytes(b"\x80\xff")
    for path, said in ((missing, "No such file"), (tmp_path, "directory"), (binary, "not YAML")):
        with pytest.raises(ConfigError, match=f"{path}: .*{said}"):
            reader(path)


@pytest.mark.parametrize(
    ("document", "ours"),
    [({"pipeline": "pega_sim"}, True), ({"pipeline": "qwen3_tts"}, False), ({}, False), ([], False)],
)
def test_files_of_other_pipelines_are_left_to_vllm_omni(tmp_path: Path, document: Any, ours: bool) -> None:
    assert is_program_file(write(tmp_path, document)) is ours


def test_stage_files_are_found_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = write(tmp_path, {}, "mine.yaml")
    assert find_stage_file("mine.yaml") == own.resolve()
    assert find_stage_file("sim") == find_stage_file("sim.yaml") == STAGE_CONFIGS / "sim.yaml"
    with pytest.raises(ConfigError, match=r"'sym'.*there are: .*piper, .*sim"):
        find_stage_file("sym")
    with pytest.raises(ConfigError, match="no such file"):
        find_stage_file("elsewhere/sim")


def test_a_file_whose_base_selects_a_program_is_ours_to_check(tmp_path: Path) -> None:
    path = tmp_path / "thin.yaml"
    path.write_text(f"base_config: {STAGE_CONFIGS / 'sim.yaml'}\nstages: []\n")
    assert is_program_file(path)
    path.write_text("base_config: nowhere.yaml\n")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        is_program_file(path)
    path.write_text("base_config: thin.yaml\n")
    with pytest.raises(ConfigError, match="leads back"):
        is_program_file(path)


@pytest.mark.parametrize("key", ["stall_seconds", "request_seconds"])
def test_deadlines_are_finite(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_engine({"program": "sim", key: float("inf")}, "here")
