"""The broken locks, in the order of the page."""

from importlib import import_module

from verify.gallery.exhibit import Exhibit

NAMES = (
    "setex_overwrites",
    "setnx_then_expire",
    "no_ttl",
    "get_then_set",
    "del_by_anyone",
    "del_after_own_ttl",
    "compare_then_del",
    "waiter_sets_expire",
    "count_never_deletes",
    "count_outlives_ttl",
    "set_nx_repeated",
    "renewal_without_owner",
    "renewal_by_set",
    "validity_from_the_reply",
    "stale_notification",
    "notified_grant_from_the_reply",
    "subscribe_after_the_check",
    "fence_that_expires",
    "hand_off_to_dead_waiter",
    "quorum_of_half",
    "quorum_without_elapsed_time",
    "quorum_fence_as_maximum",
    "quorum_partial_clean_up",
)


def exhibits() -> dict[str, Exhibit]:
    """Return the exhibits by module name."""
    return {name: import_module(f"{__name__}.{name}").EXHIBIT for name in NAMES}
