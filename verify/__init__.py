"""Verification of the shipped code; not shipped itself.

explore, explorer       every interleaving of small models (`python -m verify.explore`)
world, transitions      the state of a model, and its successors
invariants, trace       the rules, and the description of a violation
lock_view, request_rules  one lock in the server, and how one request may change it
models, claim_models, local_handoff_models, thread_models, quorum_models
simulate, simulator     many clients with random faults (`python -m verify.simulate`)
scenario, monitor       the parameters of a simulation, and its checks
process, fingerprint    the shipped client on virtual time
virtual_server, server_commands, lua
mutation                plants errors in the shipped code
gallery                 broken locks and their traces (`python -m verify.gallery`)
sequence_diagram        renders the diagrams of the documentation
"""
