"""The decode-verify-rollback loop. A drafter guesses tokens cheaply; the canonical pass decides which of them are committed.

`Loop.step` serves all jobs together. A job brings one branch up to date with its tokens and generates more. Each admitted job
has one `Turn` per step:

| stage     | modules                        | what happens                                                                  |
|-----------|--------------------------------|-------------------------------------------------------------------------------|
| admit     | `admission`, `planner`, `room` | plans a turn: the rows without KV, the number of drafts, and pages for both   |
| draft     | `drafters`                     | proposes chains of tokens; any KV written here is provisional                 |
| verify    | `loop`, `verify`               | runs one canonical pass over the rows and drafts of all turns, then accepts   |
|           |                                | each draft that equals the token chosen from the row before it                |
| commit    | `commit`                       | adds accepted tokens, their KV and their captured rows, all or none           |
| roll back | `commit`                       | cuts off rejected drafts; they become a rejected branch with its own rows     |

One turn, with three drafts of which one is accepted:

    before       ... A B C              C is pending: in the sequence, its KV not computed yet
    draft        ... A B C d1 d2 d3     written to the tree as drafts
    canonical pass       C d1 d2 d3     overwrites the KV that the drafter wrote
    chosen               d1 x           row C chooses d1, so d1 is accepted; row d1 chooses x, so d2 is rejected
    after        ... A B C d1 x         x comes from the canonical logits and is the next pending token
    rejected                  d2 d3     a branch that leaves after d1

Every committed token is chosen from canonical logits, and every committed KV entry and row comes from a canonical pass. So
the output is a function of weights, path and edits; drafts only change how many tokens one pass yields. Preemption is a
rollback of KV alone: a branch that gives up its pages is computed again, to the same bits.

`lane` holds what is live of a branch (`Lane`) and the work on it (`Job`); `turn` holds one job's part of one step.
"""
