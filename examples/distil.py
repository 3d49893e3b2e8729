"""On-policy distillation: the student answers, and a teacher rates every token of its answers. The advantage of a token
is the teacher's log-probability less the student's, so the mean over sampled tokens is minus the reverse KL divergence.
Both need the same vocabulary.

    python examples/distil.py STUDENT TEACHER [ROUNDS]
"""

import sys

import graftune

PROMPTS = [[{"role": "user", "content": f"Name a {thing}."}] for thing in ("colour", "fruit", "city", "river")]


def main(student: str, teacher: str, rounds: str = "20", **settings: object) -> list[float]:
    divergences = []
    with (
        graftune.open(student, loss="importance_sampling", max_seq_len=128, **{"lr": 1e-4, **settings}) as ours,
        graftune.open(teacher, max_seq_len=128, **settings) as theirs,
    ):
        for number in range(int(rounds)):
            examples = []
            groups = ours.sample(PROMPTS, n=4, max_new_tokens=16, seed=number)
            for prompt, group in zip(PROMPTS, groups, strict=True):
                tokens = ours.encode(prompt)
                for answer in group:
                    new = answer.tokens + ([answer.end.id] if answer.end else [])
                    logprobs = answer.sampling_logprobs + ([answer.end.sampling_logprob] if answer.end else [])
                    mask = [0] * len(tokens) + [1] * len(new)
                    examples.append({"tokens": tokens + new, "mask": mask, "logprobs": [0.0] * len(tokens) + logprobs})
            rated = theirs.logprobs([{"tokens": one["tokens"], "mask": one["mask"]} for one in examples])
            total = count = 0.0
            for one, teacher_logprobs in zip(examples, rated, strict=True):
                skipped = one["mask"].count(0)
                own = one["logprobs"][skipped:]
                gain = [high - low for high, low in zip(teacher_logprobs.tolist(), own, strict=True)]
                one["advantages"] = [0.0] * skipped + gain
                total, count = total - sum(gain), count + len(gain)
            ours.forward_backward(examples)
            ours.optim_step()
            divergences.append(total / count)
            print(f"round {number}: KL divergence {divergences[-1]:.3f} per token")
    return divergences


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
