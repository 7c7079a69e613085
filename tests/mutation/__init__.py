"""Which one-line defects the quick tests notice.

A test suite is trusted because its tests fail when the code is wrong. This package tries that out: it puts one defect
at a time (a comparison flipped, a number off by one, `and` for `or`, a `not` or a statement left out, a constant
returned, two arguments swapped) into a copy of the source and runs the quick tests that reach it until one fails.

`defects` lists every defect and draws some of them, `reach` finds out which test reaches which block of the source,
`trial` puts a defect in and runs tests, `__main__` is the command.
"""
