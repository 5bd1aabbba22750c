"""What the engine has done and how full it is, in numbers."""

import dataclasses
from dataclasses import dataclass
from typing import Any


def _counter(help: str) -> Any:
    return dataclasses.field(default=0, metadata={"type": "counter", "help": help})


def _gauge(help: str) -> Any:
    return dataclasses.field(default=0, metadata={"type": "gauge", "help": help})


@dataclass
class Metrics:
    """Counters since the engine was made, and gauges of this moment. A request counts once a sample."""

    submitted: int = _counter("sequences handed in")
    finished: int = _counter("sequences that ended by themselves")
    aborted: int = _counter("sequences taken back")
    preemptions: int = _counter("times that a sequence had to give back its row and pages")
    prompt_tokens: int = _counter("tokens of the prompts of all sequences that joined, each time they joined")
    cached_tokens: int = _counter("of them, tokens whose keys and values were found in pages")
    new_tokens: int = _counter("tokens written")
    computed_tokens: int = _counter("tokens that went through the model")
    drafted_tokens: int = _counter("tokens guessed")
    accepted_tokens: int = _counter("guesses that were right")
    visits: int = _counter("times that the host decided what runs next")
    steps: int = _counter("steps of the model")
    steps_by_size: dict[int, int] = dataclasses.field(
        default_factory=dict,
        metadata={
            "type": "counter",
            "help": "steps, by the number of tokens they are made for",
            "label": "size",
        },
    )
    compiles: int = _counter("programs compiled")
    seconds: float = _counter("seconds in visits")
    device_seconds: float = _counter("of them, seconds in which the device ran steps")
    running: int = _gauge("sequences in rows")
    waiting: int = _gauge("sequences in the queue")
    peak_running: int = _gauge("most sequences that were in rows at once")
    pages: int = _gauge("pages of the pool")
    pages_free: int = _gauge("pages that nobody holds")
    peak_pages: int = _gauge("most pages that rows held at once, seen at the ends of visits")
    pages_cached: int = _gauge("pages kept for their prefix alone")
    wasted_slots: int = _gauge("slots behind the last token of each row")

    @property
    def pages_used(self) -> int:
        """Pages that rows hold."""
        return self.pages - self.pages_free - self.pages_cached

    @property
    def host_seconds(self) -> float:
        """Seconds in visits in which the device had nothing to do."""
        return self.seconds - self.device_seconds

    @property
    def step_seconds(self) -> float:
        """A step of the model, on average."""
        return self.device_seconds / self.steps if self.steps else 0.0

    def since(self, before: "Metrics") -> "Metrics":
        """What the counters have gained since then; gauges as they are."""
        gained: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            now, then = getattr(self, field.name), getattr(before, field.name)
            if isinstance(now, dict):
                gained[field.name] = {key: count - then.get(key, 0) for key, count in now.items()}
            elif field.metadata["type"] == "counter":
                gained[field.name] = now - then
        return dataclasses.replace(self, **gained)

    def copy(self) -> "Metrics":
        return dataclasses.replace(self, steps_by_size=dict(self.steps_by_size))

    def line(self) -> str:
        """For people, in one line."""
        rate = self.new_tokens / self.seconds if self.seconds else 0.0
        hits = f"{self.cached_tokens / self.prompt_tokens:.0%}" if self.prompt_tokens else "0%"
        return (
            f"{self.running} running, {self.waiting} waiting, {self.finished} done | {rate:.0f} tokens/s | "
            f"pages {self.pages_used} used, {self.pages_cached} cached, {self.pages_free} free | "
            f"{hits} of prompts cached, {self.preemptions} preempted"
        )

    def prometheus(self, prefix: str = "paged_jax") -> str:
        """The text format of Prometheus, version 0.0.4."""
        lines = []
        for field in dataclasses.fields(self):
            kind = field.metadata["type"]
            name = f"{prefix}_{field.name}" + ("_total" if kind == "counter" else "")
            lines += [f"# HELP {name} {field.metadata['help']}", f"# TYPE {name} {kind}"]
            value = getattr(self, field.name)
            if isinstance(value, dict):
                label = field.metadata["label"]
                lines += [f'{name}{{{label}="{key}"}} {count}' for key, count in sorted(value.items())]
            else:
                lines.append(f"{name} {value}")
        return "\n".join(lines) + "\n"
