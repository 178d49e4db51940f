"""Why a model answers as it does, shown at the hospital.

Stands on training; knows no method.
"""
