# %% [markdown]
# # An example lab

# %% tags=["parameters"]
device, seed, size = "cpu", 0, 3

# %% tags=["hide-input"]
# The exercises of a real lab are in the package; these two are registered by the notebook itself.
from cbserve.course import check, solved
from cbserve.course.exercise import Exercise
from cbserve.course.exercises import register

register(
    *(
        Exercise(
            id=f"lab0.{name}",
            title=name.capitalize(),
            difficulty=1,
            importance=2,
            minutes=3,
            points=points,
            hints=("add them", "use sum", "sum(x) is nearly it"),
            cases=lambda seed: [([1, 2, 3],), ([seed, 5],)],
            reference=reference,
            diagnose=lambda args, value, expected: "the items are added",
        )
        for name, points, reference in [("sum", 2, sum), ("mean", 3, lambda x: sum(x) / len(x))]
    )
)

# %% [markdown]
# ## The sum


# %% tags=["exercise"]
# exercise: lab0.sum
def total(numbers):
    # BEGIN SOLUTION
    return sum(numbers)
    # END SOLUTION


# %%
check("lab0.sum", total)

# %%
if solved("lab0.sum"):
    print("the sum of 1 to 10 is", total(range(1, 11)))


# %% tags=["exercise"]
# exercise: lab0.mean
def mean(numbers):
    # BEGIN SOLUTION
    # STUB: count = len(numbers)
    # STUB: if count:
    # STUB:     pass  # your code here
    # STUB: return None
    return sum(numbers) / len(numbers)
    # END SOLUTION


# %%
check("lab0.mean", mean)

# %% tags=["solution"]
print("only in the solution")
