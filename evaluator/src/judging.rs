//! What the target says about the drafts of a round: from its logits to verdicts, by the rule that fits how each draft was made.

use tch::Tensor;
use torch::TorchError;

use crate::sampling::{Sampler, TokenPlace};
use crate::verification::{Verdict, verify, verify_drawn};

/// A draft before its verdict.
pub(crate) struct Trial<'a> {
    /// Of its first token.
    pub(crate) place: TokenPlace,
    pub(crate) draft: &'a [u32],
    /// The distribution that each token was drawn from; absent where they are the likeliest ones.
    pub(crate) drawn_from: Option<&'a [Vec<f32>]>,
}

/// The verdicts of these trials by the target's logits `[R, V]`: trial by trial one row for each drafted token, and one more.
pub(crate) fn judge(logits_rv: &Tensor, sampler: &Sampler, trials: &[Trial<'_>]) -> Result<Vec<Verdict>, TorchError> {
    torch::guarded("choosing the target's tokens", || {
        // At temperature 0 choices need no noise, so those of all rows are taken at once.
        let greedy = (sampler.temperature <= 0.0).then(|| sampler.choose(logits_rv, 0, &[]));
        let mut row = 0;
        let verdict = |trial: &Trial<'_>| {
            let (first, rows) = (row, trial.draft.len() + 1);
            row += rows;
            let own_rv = || logits_rv.narrow(0, first as i64, rows as i64);
            match (trial.drawn_from, &greedy) {
                (Some(drafter), _) => {
                    let vocabulary = logits_rv.size()[1] as usize;
                    let probabilities = torch::to_f32s(&sampler.probabilities(&own_rv()));
                    let target: Vec<&[f32]> = probabilities.chunks(vocabulary).collect();
                    verify_drawn(trial.draft, drafter, &target, &sampler.chances(trial.place, trial.draft.len()))
                }
                (None, Some(choices)) => verify(trial.draft, &choices[first..first + rows]),
                (None, None) => {
                    let positions: Vec<usize> = (trial.place.position..trial.place.position + rows).collect();
                    verify(trial.draft, &sampler.choose(&own_rv(), trial.place.request, &positions))
                }
            }
        };
        trials.iter().map(verdict).collect()
    })
}
