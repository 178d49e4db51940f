"""What a hospital answers to a survey of its data: counts, floored here, and the same each time.

Stands on opening and site. Nothing of the question enters the first answer but which data set, as
the run has it; and no later question gets another one.
"""
