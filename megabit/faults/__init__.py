"""What breaks in a cluster, and how a run notices: signs of life and the watchdog, drills, checks
of collectives and of replicated weights.

- a rank dies: its peers see it by their connections (``pipeline.mailbox``, gloo), ``watchdog``
  names it by the signs of life that are missing; all end, and the launcher (``cli.agent``) starts
  all again from the newest checkpoint
- a rank hangs, is stopped, or its link is cut: the watchdog of every other rank sees it after
  ``faults.hang_s``, by two threads beside the training thread, one for signs of life in the store
  that ranks met at, one for the clock. Stacks of all threads, who is silent or behind, exit code 71
- a host leaves or comes: the launcher's rendezvous (``cli.meeting``); all save, and go on with the
  hosts that are there. A sample's number, not a rank, says which tokens it has
- a rank is slow: ``straggler_ratio`` against ranks with the same work; an alert names it
- replicas compute with other weights than they should: every ``faults.check_codes_interval`` steps
  a 64-bit hash of codes, γ and dense weights over DP (``code_check``), half a millisecond for each
  MB. It is named, published anew from the masters, and stopped if that does not help
- ranks are about to call different collectives: ``collective_check``, for debugging; a message of
  fixed size before each. One error says what each rank calls; gloo would end the process
- storage fails in passing: ``megabit.retry`` around reads and writes. Only these and the rendezvous
  are tried again: a collective that one rank repeats alone would match another one of the others

``drills`` plants each of these, in a test or in a cluster.
"""

HUNG = 71
"""Exit code of a rank that its watchdog has ended."""
