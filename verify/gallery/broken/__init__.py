"""The broken locks, in the order in which the gallery shows them."""

from importlib import import_module

from verify.gallery.exhibit import Exhibit

NAMES = (
    "setex_overwrites",
    "setnx_then_expire",
    "no_longest_hold",
    "get_then_set",
    "del_by_anyone",
    "del_after_own_ttl",
    "get_equals_me_then_del",
    "waiter_expires_what_it_finds",
    "count_never_deletes",
    "count_outlives_ttl",
    "set_nx_sent_again",
    "renewal_without_owner",
    "renewal_by_set",
    "validity_from_the_reply",
    "old_push_at_face_value",
    "wait_from_the_reply",
    "subscribe_after_the_check",
    "fence_that_expires",
    "hand_off_to_the_dead",
    "quorum_of_half",
    "quorum_without_elapsed_time",
    "quorum_fence_as_maximum",
    "quorum_clean_up_skips_the_late",
)


def exhibits() -> dict[str, Exhibit]:
    """Each exhibit by the name of its module."""
    return {name: import_module(f"{__name__}.{name}").EXHIBIT for name in NAMES}
