"""The decode-verify-rollback loop. A drafter guesses tokens cheaply; the canonical pass decides which of them are committed.

`Loop.step` serves all jobs together. A job brings one branch up to date with its tokens and generates more. Each admitted job
has one `Turn` per step:

| stage     | where                          | what happens                                                                  |
|-----------|--------------------------------|-------------------------------------------------------------------------------|
| admit     | `Admission`, in `admission.py` | plans a turn: the rows without KV, the number of drafts, and pages for both   |
| draft     | `drafters.py`                  | proposes chains of tokens; any KV written here is provisional                 |
| verify    | `Loop.verify`, in `loop.py`    | runs one canonical pass over the rows and drafts of all turns, then accepts   |
|           |                                | each draft that equals the token chosen from the row before it                |
| commit    | `Committer`, in `commit.py`    | adds accepted tokens, their KV and their captured rows, all or none           |
| roll back | `Committer`                    | cuts off rejected drafts; they become a rejected branch with its own rows     |

One turn, with three drafts of which one is accepted:

    before       ... A B C              C is pending: in the sequence, its KV not computed yet
    draft        ... A B C d1 d2 d3     written to the tree as drafts
    canonical pass       C d1 d2 d3     overwrites the KV that the drafter wrote
    chosen               d1 x           row C chooses d1, so d1 is accepted; row d1 chooses x, so d2 is rejected
    after        ... A B C d1 x         x comes from the canonical logits and is the next pending token
    rejected                  d2 d3     a branch that leaves after d1

The drafter `self` is the model's own fast path. Its drafts share the fast batch with ordinary requests (deterministic=False):
each step, one fast pass yields one token of every ordinary request and one draft of every `Window` that is not full, and one
canonical pass verifies the windows that are full. On a device that decodes on its own, a step has several tokens of every
ordinary request and as many drafts of every window (`Loop.burst`). Between steps drafts belong to the job, not to the tree.

Every committed token is chosen from canonical logits, and every committed KV entry and row comes from a canonical pass. So
the output is a function of weights, path and edits; drafts only change how many tokens one pass yields. Preemption is a
rollback of KV alone: a branch that gives up its pages is computed again, to the same bits.

A `Verdict` is what the pass says about a turn's drafts: how many are accepted, and the token after them. An `Outcome` is what
is committed of it: a stop token or the request's length may end the turn earlier, and a turn without a verdict, such as a part
of a prompt, has an outcome too.

There are four kinds of undo:

| what                    | when                               | what it undoes                                                |
|-------------------------|------------------------------------|---------------------------------------------------------------|
| `Committer.drop_drafts` | a turn is judged, or tried again   | the drafts in the tree; pages and rows are left to the caller |
|                         | without its drafts                 |                                                               |
| `Committer.abandon`     | the turn's pass failed, or was     | the whole turn: drafts, pages, KV; the branch is as before it |
|                         | interrupted                        |                                                               |
| `Loop._isolate`         | a pass of several turns failed     | nothing yet: runs each turn alone to find the one that fails, |
|                         |                                    | which is then abandoned                                       |
| `JobQueue.end`          | a job is cancelled, or failed      | the rest of the job; committed tokens stay, and forced tokens |
|                         |                                    | without KV are removed                                        |

Captured rows come with their token, but Z, the logit lens, holds the log-probability of the *next* token. Three names deal
with that. `CaptureSpec.lag` says how many tokens after its own a row depends on: 1 with Z, else 0. `Recording.open_end` says
that the last row was read at the tip, where no token follows: its Z.emitted is NaN. `Lane.first_missing` then starts the next
pass one position earlier, so that this row is computed and read again, with the same bits elsewhere. Removing a token drops
the row before it as well, since its Z depends on that token.

`lane.py` holds what is live of a branch (`Lane`), the work on it (`Job`) and one job's part of one step (`Turn`).
"""
