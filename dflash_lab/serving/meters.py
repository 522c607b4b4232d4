"""What a server has drafted since its start, for Prometheus: vLLM's counters under our prefix."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from dflash_lab.serving.worker import Totals

PREFIX = "dflash_lab_spec_decode_"


class Meters:
    """A registry of its own: what else counts in this process stays out of it."""

    def __init__(self, totals: Totals):
        self.totals = totals
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        totals = self.totals
        for name, help_text, value in (
            ("num_drafts", "Blocks drafted.", totals.blocks),
            ("num_draft_tokens", "Tokens drafted.", totals.drafted),
            ("num_accepted_tokens", "Drafted tokens accepted.", totals.accepted),
        ):
            yield CounterMetricFamily(PREFIX + name, help_text, value=value)
        per_position = CounterMetricFamily(
            f"{PREFIX}num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by their place in the block, the first being 0.",
            labels=["position"],
        )
        for place, count in enumerate(list(totals.accepted_at)):
            per_position.add_metric([str(place)], count)
        yield per_position

    def page(self) -> bytes:
        return generate_latest(self.registry)
