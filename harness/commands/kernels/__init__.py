"""`eagletwin kernels`: SGLang's small speculative functions, called one at a time and compared with reference/.

    command.py    the command: options, what is printed, exit code
    runner.py     that process: imports the SGLang that was named, runs properties, sends results
    results.py    starts that process, reads what it sends, and prints it
    tier.py       what a property is, how planted faults are tried on it, and how it says that two values differ
    properties/   the properties, a file a subject, and the names that the command takes
    runtime.py    what executes kernels, and plants a fault in a function, in memory
    release.py    finds SGLang's functions by dotted name, in any release
    trees.py      draft trees for cases

Quick start: adding a function
------------------------------
1. Choose the file of properties/ whose subject fits, or add one and name it in properties/__init__.py.
2. Write a frozen dataclass that holds a case, and a Hypothesis strategy of such cases: sizes are drawn, so that a failure
   shrinks; the contents come from a seed.
3. Write `holds(case)`: call the function with `load(MODULE).function(…)`, compute the same with reference/, compare with
   `same("name of the output", actual, expected)`. Fill outputs that the caller owns with a value that no result has.
4. Decorate it with `holds_for(cases, fault(…), …)`, one fault or more for each function: it replaces an expression of it, and
   `holds` must catch that. A function without a planted fault is not in the tier.
5. If cases of the CPU engine reach it, add the property to the table of docs/explanation/kernels.md.
6. Run `eagletwin kernels NAME`, then `pytest tests/kernels`.
"""
