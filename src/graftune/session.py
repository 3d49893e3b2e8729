"""A model ready to compute: base, adapters and decoder, put together from a configuration. Training, evaluation and
chat all start here, so an adapter means the same in each of them."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graftune.config import Config, LoraConfig, expand_targets
from graftune.data.template import template_from_file
from graftune.errors import GraftuneError
from graftune.files import whole
from graftune.kernels import attention
from graftune.model.decoder import Decoder
from graftune.model.lora import Arena, build_arena, initialise, start_from_scratch
from graftune.runtime import Runtime, resolve
from graftune.tokenizer import Tokenizer
from graftune.weights.adapter import Adapter, is_adapter, load_adapter, place_adapter, save_adapter
from graftune.weights.base import Base, open_base, with_new_tokens
from graftune.weights.load import build_decoder
from graftune.weights.model import hf_config, is_model, save_model
from graftune.weights.placement import Placement, choose_placement, nothing_frozen

# Written into the config.yaml of runs before these became twice the rank and PEFT's start: nobody asked for them.
_EARLIER_DEFAULTS = {"alpha": 32.0, "init": "gaussian"}


@dataclass
class Engine:
    config: Config  # as asked for, with what `auto` came to filled in
    base: Base
    runtime: Runtime
    placement: Placement
    lora: LoraConfig  # of the adapter where one was loaded
    arena: Arena
    decoder: Decoder
    attention: attention.Choice
    whole: dict[str, Any] | None = None  # the configuration to save the model with, where all of it trains

    @property
    def product(self) -> str:
        """What a run leaves, and the name of its folder there."""
        return "adapter" if self.whole is None else "model"

    def save(self, folder: Path) -> None:
        """The adapter, or the whole model where that was trained."""
        if self.whole is None:
            self.save_adapter(folder)
        else:
            save_model(folder, self.arena, self.base, self.whole, self.runtime.compute)

    @property
    def eager_attention(self) -> str:
        """The backend where shapes change from batch to batch."""
        runtime, width = self.runtime, self.base.spec.head_width
        return attention.for_any_shape(self.attention.backend, runtime.device, runtime.compute, width)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.base.tokenizer

    def save_adapter(self, folder: Path) -> None:
        tables = {}
        for name, table in (("embed_tokens", self.decoder.embedding), ("lm_head", self.decoder.head.frozen)):
            if f"{name}.rows" in self.arena.slots:
                ids = torch.arange(table.out_features, device=self.runtime.device)
                tables[name] = table.rows(ids)
        data = self.config.data
        facts = {
            "template": "none" if data.template == "none" else "auto",
            "append_eos": data.append_eos,
            "revision": self.config.base.revision,
        }
        save_adapter(folder, self.arena, self.lora, self.base, tables, facts)


def open_engine(config: Config, *, base: Base | None = None, placement: Placement | None = None) -> Engine:
    """Open the base unless it is given, resolve what is `auto`, lay out the adapters and place the weights (as was
    planned, or as fits now)."""
    runtime = resolve(
        config.base.device,
        config.base.compute_dtype,
        threads=config.base.threads,
        deterministic=config.train.deterministic,
    )
    recompute = resolved_recompute(config.train.recompute, runtime.device)
    check_method(config)
    method = config.train.method
    base = base or open_base(config.base.base, config.base.revision, weights=method != "scratch")
    adapter = load_adapter(Path(config.lora.adapter)) if config.lora.adapter else None
    lora = _settings(config.lora, adapter)
    if adapter is not None:
        check_base(adapter, base, config.base.any_base)
    if lora.new_tokens:
        base = with_new_tokens(base, lora.new_tokens)
    base = with_template(base, config, adapter)
    config = config.replace(max_seq_len=config.data.longest(base.spec.max_positions))
    attend = attention_for(base, runtime, config.data.max_seq_len)
    whole = hf_config(base) if method != "lora" else None
    place = choose_placement if method == "lora" else nothing_frozen
    placement = placement or place(base, config.base.base_dtype, runtime)
    arena = build_arena(base.spec, lora, runtime.device, runtime.compute, full=method != "lora")
    decoder = build_decoder(base, arena, lora, runtime, placement)
    if method == "scratch":
        start_from_scratch(arena, base.spec, config.train.seed)
    elif method == "full":
        arena.publish()
    elif adapter is None:
        initialise(arena, lora, config.train.seed)
    else:
        place_adapter(adapter, arena, base)
    resolved = config.replace(
        device=str(runtime.device),
        compute_dtype=runtime.compute_name,
        base_dtype=placement.base_dtype,
        recompute=recompute,
        alpha=lora.alpha if method == "lora" else config.lora.alpha,
    )
    return Engine(resolved, base, runtime, placement, lora, arena, decoder, attend, whole)


def check_method(config: Config) -> None:
    """Settings of adapters where none are trained are a mistake: they would be read by nobody."""
    method, default = config.train.method, LoraConfig()
    for name, value in vars(config.lora).items() if method != "lora" else ():
        if value not in (getattr(default, name), _EARLIER_DEFAULTS.get(name)):
            raise GraftuneError(
                f"{name} is set and method is {method}, which trains no adapter",
                mend=f"leave {name} out, or set method to lora",
            )


def resolved_recompute(asked: str, device: torch.device) -> str:
    """What a device can do, and none where nobody plans: a run has settled `auto` before."""
    if asked == "offload" and device.type != "cuda":
        raise GraftuneError(
            f"recompute is offload, which needs a CUDA device, and this is {device}", mend="use none, selective or full"
        )
    return "none" if asked == "auto" else asked


def attention_for(base: Base, runtime: Runtime, longest: int) -> attention.Choice:
    """Chosen once. Where only some layers have a window that documents reach, those take our own kernels and the others
    the fastest."""
    spec = base.spec
    windowed = len(spec.window_layers) == spec.layers and spec.window < longest
    how = runtime.device, runtime.compute, spec.head_width, runtime.deterministic
    return attention.choose(*how, windowed, capped=spec.attention_cap > 0)


def with_template(base: Base, config: Config, adapter: Adapter | None) -> Base:
    """The base with the chat template the run uses: a file of the user's, or the one saved with the adapter. It then
    travels with the tokenizer into the next adapter that is saved. Where it prints a date, that is the run's."""
    file, date = config.data.template, config.data.date
    saved = adapter.folder / "chat_template.jinja" if adapter else None
    if file == "auto" and saved is not None and saved.is_file():
        file = str(saved)
    if file in ("auto", "none") and not date:
        return base
    template = base.tokenizer.template if file in ("auto", "none") else template_from_file(file, base.tokenizer)
    if date and template is not None:
        template = template.dated(datetime.datetime.fromisoformat(date))
    if template is base.tokenizer.template:
        return base
    return dataclasses.replace(base, tokenizer=dataclasses.replace(base.tokenizer, template=template))


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def trains_all(folder: Path) -> bool:
    """Whether a run's folder is that of one without an adapter."""
    return Config.of_run(folder).train.method != "lora"


def whole_run(folder: Path) -> dict[str, Any]:
    """Settings that open the whole model a run left, for data as the run took it. A template lies with the model."""
    if not is_model(folder / "model"):
        raise GraftuneError(
            "this run has no model yet", where=str(folder), mend=f"finish it with `graftune train --resume {folder}`"
        )
    data = Config.of_run(folder).nested()["data"]
    template = "none" if data["template"] == "none" else "auto"
    return data | {"template": template, "base": str(folder / "model")}


def adapter_folder(folder: Path) -> Path:
    """An adapter's folder, given that or the run that made it."""
    run = Path(str(folder).rpartition("@")[0] or ".")
    if "@" in folder.name and not folder.exists() and is_run(run):
        raise GraftuneError(
            "names a checkpoint, and training continues from an adapter",
            where=str(folder),
            mend=f"write it out with `graftune export {folder} --to peft` and give that folder",
        )
    if not is_run(folder):
        return folder
    if trains_all(folder):
        raise GraftuneError(
            "this run trained the whole model, not an adapter",
            where=str(folder),
            mend=f"give {folder / 'model'} as the base",
        )
    place = whole(folder / "adapter")
    if not is_adapter(place):
        raise GraftuneError(
            "this run has no adapter yet", where=str(folder), mend=f"finish it with `graftune train --resume {folder}`"
        )
    return place


def with_adapter(config: Config, adapter: Adapter) -> Config:
    """The configuration of a run that starts from an adapter: rank, targets and the rest are the adapter's (asking for
    others is a contradiction), and so are its base and template where none is asked for."""
    default = LoraConfig()
    settled = {}
    for name in ("rank", "alpha", "targets", "rslora", "train_norms", "new_tokens"):
        asked, has = getattr(config.lora, name), getattr(adapter.lora, name)
        same = expand_targets(asked) == has if name == "targets" else asked == has
        if not same and asked != getattr(default, name):
            raise GraftuneError(
                f"{name} is {asked!r} and the adapter's is {has!r}", where=str(adapter.folder), mend=f"leave {name} out"
            )
        settled[name] = has
    data = config.data
    return config.replace(
        **settled,
        adapter=str(adapter.folder),
        base=config.base.base or find_base(adapter),
        revision=config.base.revision or adapter.revision,
        template=adapter.template if data.template == "auto" else data.template,
        append_eos=data.append_eos or adapter.append_eos,
    )


def _settings(asked: LoraConfig, adapter: Adapter | None) -> LoraConfig:
    """An adapter brings its own rank, alpha, targets; only dropout is the run's."""
    if adapter is None:
        return asked.resolved()
    return dataclasses.replace(adapter.lora, dropout=asked.dropout, adapter=asked.adapter)


def check_base(adapter: Adapter, base: Base, any_base: bool) -> None:
    """Beside other weights an adapter means nothing, and where the shapes are equal nothing else would show it."""
    if not any_base and adapter.base_sha256 and adapter.base_sha256 != base.sha256:
        raise GraftuneError(
            f"was trained on another base than {base.path}",
            where=str(adapter.folder),
            mend="give its own with --base, or say --any-base if this is the same model in another file",
        )


def find_base(adapter: Adapter) -> str:
    """The base an adapter says it belongs to, as something open_base takes."""
    name = adapter.base_name
    if name and (Path(name).exists() or not name.startswith("/")):
        return name
    # A path from another machine or environment: the bundled base may be the same file elsewhere.
    from graftune.weights.base import default_base

    try:
        fallback = open_base(str(default_base()))
    except GraftuneError:
        fallback = None
    if fallback is not None and fallback.sha256 == adapter.base_sha256:
        return str(fallback.path)
    raise GraftuneError(
        f"its base {name or '(none named)'} is not here", where=str(adapter.folder), mend="say where it is with --base"
    )
