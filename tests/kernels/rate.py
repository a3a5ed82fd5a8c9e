"""How many cases of each property a second of processor time takes: `python -m tests.kernels.rate`, from the checkout.

Drawing a case by Hypothesis, and running SGLang and the reference on it; and the second of the two alone.
"""

import time

import conftest  # noqa: F401  the settings that every test has
from eagletwin.harness.commands.kernels.properties import ALL
from eagletwin.harness.commands.kernels.release import prepare
from eagletwin.harness.commands.kernels.runtime import running
from eagletwin.harness.commands.kernels.tier import same_cases


def main(count: int = 500) -> None:
    prepare()
    print("| property | cases/s | without drawing |\n|---|---|---|")
    drawn, whole, alone = 0, 0.0, 0.0
    with running():
        for of in ALL:
            cases: list[object] = []

            def keep(case: object, cases: list[object] = cases, of: object = of) -> None:
                cases.append(case)
                of.holds(case)  # type: ignore[attr-defined]

            of.check(same_cases(5))  # pools are built once
            start = time.process_time()
            type(of)(of.name, of.cases, keep, of.faults).check(same_cases(count))
            middle = time.process_time()
            for case in cases:
                of.holds(case)
            end = time.process_time()
            drawn, whole, alone = drawn + len(cases), whole + middle - start, alone + end - middle
            print(f"| {of.name} | {len(cases) / (middle - start):.0f} | {len(cases) / (end - middle):.0f} |")
    print(f"| all, {drawn} cases | {drawn / whole:.0f} | {drawn / alone:.0f} |")


if __name__ == "__main__":
    main()
