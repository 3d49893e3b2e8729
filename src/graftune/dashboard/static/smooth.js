// Exponential smoothing by steps, so that it means the same however far apart the points are; without the pull of the
// first value (the divisor takes it out). It changes what is drawn, never a figure.

export const USUAL = 2; // percent of a run's steps
const LEAST = 50; // a run with fewer steps is not smoothed: every step can be seen

// The steps over which a run of so many steps is smoothed; 0: not at all.
export function spanOf(steps, percentage) {
  const span = (steps * percentage) / 100;
  return steps >= LEAST && span > 1 ? span : 0;
}

export function smoothed(steps, values, span) {
  if (!span) return values;
  let [mean, weight, before] = [0, 0, steps[0] - 1];
  return values.map((value, at) => {
    if (!Number.isFinite(value)) return value;
    const kept = (1 - 1 / span) ** (steps[at] - before);
    before = steps[at];
    mean = kept * mean + (1 - kept) * value;
    weight = kept * weight + (1 - kept);
    return mean / weight;
  });
}

// The training loss of a part of a run, drawn smoothly: of a downsampled one by the means of its buckets.
export function smoothLoss({ steps, values }, span) {
  return smoothed(steps, values.loss_mean ?? values.loss, span);
}
