"""What happens to a request when an attempt fails: one table, budgets and their reasons. Pure.

Only the ingress asks this table; workers report and stop. BUSY, drains and lost answers cost nothing; a failed transfer
and a crash are charged to budgets of their own, so that no request can go round for ever.
"""

from dataclasses import dataclass, replace
from typing import Literal

from router.errors import ApiError, ErrorKind

Failure = Literal[
    "busy",  # a worker refused the reservation
    "draining",  # a worker leaves and gave the request back
    "unknown",  # after a re-dial the worker knows nothing of the attempt
    "transfer",  # the KV cache did not arrive, or prefill failed on its way
    "prefill_lost",  # prefill's link went, and decode gave no verdict in time
    "decode_lost",  # decode's process went
    "internal",  # a worker reported a fault of its own
    "invalid",  # a worker refused the request itself
    "first_token_deadline",
    "progress_deadline",
    "total_deadline",
]
Charge = Literal["none", "transfer", "crash"]


@dataclass(frozen=True, slots=True)
class Spent:
    """What a request has used up."""

    failed_transfers: int = 0
    crashes: int = 0


@dataclass(frozen=True, slots=True)
class Budgets:
    failed_transfers: int
    crashes: int


@dataclass(frozen=True, slots=True)
class Situation:
    """What the judge looks at besides the failure."""

    has_tokens: bool
    spent: Spent
    another_prefill: bool
    """A ready prefill worker that has not failed this request."""
    local_allowed: bool


@dataclass(frozen=True, slots=True)
class Retry:
    """Back to its place in the queue; `is_local`: decode computes the prompt itself."""

    spent: Spent
    is_local: bool = False


@dataclass(frozen=True, slots=True)
class _Rule:
    charge: Charge
    error: ErrorKind
    message: str
    is_final: bool = False


_RULES: dict[Failure, _Rule] = {
    "busy": _Rule("none", "worker_lost", "No worker took the request over."),
    "draining": _Rule("none", "worker_lost", "The worker that served the request left."),
    "unknown": _Rule("none", "worker_lost", "The worker that served the request lost it."),
    "transfer": _Rule("transfer", "worker_lost", "The prompt's KV cache could not be moved to a decode worker."),
    "prefill_lost": _Rule("none", "worker_lost", "The worker that computed the prompt was lost."),
    "decode_lost": _Rule("crash", "worker_lost", "The worker that generated the answer was lost."),
    "internal": _Rule("crash", "internal", "A worker failed on this request."),
    "invalid": _Rule("none", "invalid_request", "The workers refuse this request.", is_final=True),
    "first_token_deadline": _Rule(
        "none", "first_token_deadline", "No token within the first-token deadline.", is_final=True
    ),
    "progress_deadline": _Rule(
        "none", "progress_deadline", "The answer made no progress within its deadline.", is_final=True
    ),
    "total_deadline": _Rule(
        "none", "total_deadline", "The answer did not end within x-baton-timeout-s.", is_final=True
    ),
}


def decide_retry(failure: Failure, situation: Situation, budgets: Budgets) -> Retry | ApiError:
    """Another attempt with its charges, or the error that ends the request.

    After the first token nothing is retried: an answer never continues elsewhere from here. A transfer that failed goes
    to another prefill worker if one is ready and the budget allows, else to decode itself, else it ends the request. A
    lost link costs nothing and waits for a prefill worker: a crash is charged by decode's verdict on the transfer.
    """
    rule = _RULES[failure]
    error = ApiError(rule.error, rule.message)
    if rule.is_final or situation.has_tokens:
        return error
    spent = _charge(situation.spent, rule.charge)
    if spent.crashes >= budgets.crashes:
        return error
    if rule.charge != "transfer":
        return Retry(spent)
    if situation.another_prefill and spent.failed_transfers <= budgets.failed_transfers:
        return Retry(spent)
    if situation.local_allowed:
        return Retry(spent, is_local=True)
    return Retry(spent) if spent.failed_transfers <= budgets.failed_transfers else error


def _charge(spent: Spent, charge: Charge) -> Spent:
    if charge == "transfer":
        return replace(spent, failed_transfers=spent.failed_transfers + 1)
    return replace(spent, crashes=spent.crashes + 1) if charge == "crash" else spent
