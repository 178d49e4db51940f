"""What a hospital answers to a survey of its data: counts, floored here, and the same each time.

It uses the session and what is below it. Nothing of the question enters the first answer but which
data set, as the run has it; and no later question gets another answer.
"""
