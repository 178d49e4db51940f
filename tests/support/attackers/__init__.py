"""What a malicious server asks a hospital for, and the rows that it reads from the answers.

Each attack asks as a malicious server can: any weights, any settings, the app as it is. It returns
candidates for rows; ``Hospital.recovered`` says how many are right.
"""
