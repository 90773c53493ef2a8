"""Cases of comparable software as data, and the runner that puts them to this one (`scripts/cases DIR`).

One module for each case file says how its steps are put to the code; runner.py says what the outcome means; decisions.toml has
what a decision of ours answers differently, by what a case is about, so that it speaks for cases nobody has seen yet as well.
"""
