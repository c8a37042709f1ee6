"""Planted faults, one at a time, in the files that carry promises: do the tests near them notice?

`python -m tests.mutants` (or `make mutants`) applies each fault of the table to a scratch copy of the tree, runs the tests
that must fail, and prints which faults were killed and which survived. The checkout itself is never changed.

| file                                            | holds                                              |
|-------------------------------------------------|----------------------------------------------------|
| `mutant.py`                                     | `Mutant`: what is replaced, what that breaks       |
| `engine.py` `memory.py` `modes.py` `dumps.py` `probes.py` `tasks.py` `thinking.py` `holes.py` | the faults, as data |
| `table.py`                                      | all of them                                        |
| `campaign.py`                                   | scratch copies, test runs, outcomes                |
| `quick.py`                                      | how Hypothesis runs in them                        |
| `test_table.py`, `test_campaign.py`             | the table fits the sources; the runner tells apart |
"""
