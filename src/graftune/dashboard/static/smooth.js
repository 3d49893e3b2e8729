// Exponential smoothing by steps, so that it means the same however far apart the points are; without the pull of the
// first value (the divisor takes it out).
export function smoothed(steps, values, factor) {
  if (!factor) return values;
  let [mean, weight, before] = [0, 0, steps[0] - 1];
  return values.map((value, at) => {
    if (!Number.isFinite(value)) return value;
    const kept = factor ** (steps[at] - before);
    before = steps[at];
    mean = kept * mean + (1 - kept) * value;
    weight = kept * weight + (1 - kept);
    return mean / weight;
  });
}
