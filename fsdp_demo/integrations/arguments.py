"""The exchange as command-line flags, beside `TrainingArguments` in an `HfArgumentParser`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..config.load import load_config
from ..config.schema import ExchangeConfig


@dataclass
class ExchangeArguments:
    """`--exchange diloco --set schedule.sync_every=100 codec.value_dtype=int8`; nothing is
    exchanged without `--exchange`.

    Example:
        >>> from transformers import HfArgumentParser
        >>> from fsdp_demo.integrations.arguments import ExchangeArguments
        >>> (exchange,) = HfArgumentParser(ExchangeArguments).parse_args_into_dataclasses(["--exchange", "diloco", "--set", "period=50"])
        >>> exchange.config().channels[0].schedule.sync_every
        50
    """  # noqa: E501

    exchange: str | None = field(
        default=None, metadata={"help": "preset name or yaml file; without it nothing is exchanged"}
    )
    set: list[str] = field(
        default_factory=list,
        metadata={
            "help": "changes to it, as in --set codec.topk=16 schedule.sync_every=50",
            "action": "extend",  # a second --set adds to the first
        },
    )

    remote: str | None = field(
        default=None,
        metadata={
            "help": "store of objects that gets a copy of every checkpoint, as in s3://bucket/run; "
            "None: ISLAND_REMOTE"
        },
    )

    def config(self) -> ExchangeConfig | None:
        """The configuration that the flags ask for; None without `--exchange`.

        Raises:
            ValueError: `--set` without `--exchange`, unknown names or values.
        """
        if self.exchange is None:
            if self.set:
                raise ValueError(
                    f"--set {' '.join(self.set)} changes an exchange, but there is none: give "
                    "--exchange PRESET too"
                )
            return None
        return load_config(self.exchange, self.set)

    def trainer(self, lr: float | None = None) -> dict[str, Any]:
        """Keywords for `Trainer(...)`: the callback and, for presets with an optimizer of their
        own, `optimizer_cls_and_kwargs`.

        Args:
            lr: learning rate of that optimizer (`training_args.learning_rate`); default the
                preset's published one.
        """
        from .trainer.callback import ExchangeCallback
        from .trainer.setup import exchange_optimizer, has_own_optimizer

        config = self.config()
        if config is None:
            return {}
        keywords: dict[str, Any] = {"callbacks": [ExchangeCallback(config, remote=self.remote)]}
        if has_own_optimizer(config):
            keywords["optimizer_cls_and_kwargs"] = exchange_optimizer(config, lr=lr)
        return keywords
