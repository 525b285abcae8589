from pathlib import Path

import pytest

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer.config import TrainConfig, config_from, load_config


def test_an_unknown_key_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(
        ConfigError, match=r"no setting `train\.learning_rat`\. Did you mean 'learning_rate'\?"
    ):
        config_from({"train": {"learning_rat": 1e-5}})


def test_an_unknown_key_inside_an_optional_section_names_that_sections_keys() -> None:
    with pytest.raises(ConfigError, match=r"`policy\.lora\.rnk`\. Did you mean 'rank'\?"):
        config_from({"policy": {"lora": {"rnk": 8}}})


def test_overrides_win_and_are_typed_by_the_schema() -> None:
    config = config_from(
        {"train": {"steps": 3}}, ["train.steps=7", "policy.lora.rank=4", "evaluate.tasks=0", "run.name=a"]
    )
    assert (config.train.steps, config.evaluate.tasks, config.run.name) == (7, 0, "a")
    assert config.policy.lora is not None
    assert config.policy.lora.rank == 4


@pytest.mark.parametrize(
    ("document", "overrides", "sentence"),
    [
        ({}, ["train.steps"], "not an override"),
        ({"train": {"steps": "many"}}, [], r"`train\.steps`: .* got 'many'"),
        ({"engine": {"kind": "vllm"}}, [], r"`engine\.kind`"),
        ({"algorithm": {"aggregation": "constant"}}, [], "needs constant_length"),
        ({"algorithm": {"gamma": 0.9}}, [], "needs credit=per_call"),
        ({"collector": {"grpc": "127.0.0.1:1"}}, [], "both addresses"),
        ({"run": {"name": "../up"}}, [], "not a valid identifier"),
        ({"train": {"steps": 1}}, ["train.steps.more=1"], "is a value, not a section"),
        ({"policy": {"sampling": {"top_p": 0.9}}}, [], "cannot be used in training"),
        ({"policy": {"sampling": {"temperature": 0}}}, [], "no alternatives to learn from"),
    ],
)
def test_what_cannot_be_honoured_is_one_sentence(
    document: dict[str, object], overrides: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_from(document, overrides)


def test_a_file_that_is_no_mapping_or_no_yaml_or_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)
    path.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="mapping of sections"):
        load_config(path)
    path.write_text("a: [1\n")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(path)


def test_a_resolved_configuration_reads_back_as_itself() -> None:
    config = config_from({"policy": {"lora": {}}, "agent": {"env": ["A"]}})
    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config
