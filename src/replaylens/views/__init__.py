"""The report page, and views of dumped examples."""
