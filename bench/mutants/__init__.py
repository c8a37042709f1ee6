"""Mutation tests: faults planted one at a time in the files that carry promises. Do the tests near them fail?

`python -m bench.mutants` (or `make mutants`) applies each fault of the table to a scratch copy of the tree, runs the tests
that must fail, and prints which mutants were killed and which survived. The checkout itself is never changed.

| file                                            | holds                                              |
|-------------------------------------------------|----------------------------------------------------|
| `mutant.py`                                     | `Mutant`: what is replaced, and what that breaks   |
| `engine.py` `memory.py` `modes.py` `dumps.py` `probes.py` `arrays.py` `tasks.py` `thinking.py` `holes.py` | the faults |
| `table.py`                                      | all of them                                        |
| `campaign.py`                                   | scratch copies, test runs, outcomes                |
| `quick.py`                                      | how Hypothesis runs in them                        |
| `tests/bench/test_mutants.py`                   | the table fits the sources; the runner is correct  |
"""
