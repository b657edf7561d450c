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
        let places = |trial: &Trial<'_>| {
            let TokenPlace { request, position } = trial.place;
            (position..=position + trial.draft.len()).map(move |position| TokenPlace { request, position })
        };
        let choices = if trials.iter().any(|trial| trial.drawn_from.is_none()) {
            sampler.choose(logits_rv, &trials.iter().flat_map(places).collect::<Vec<_>>())
        } else {
            Vec::new()
        };
        let mut row = 0;
        let verdict = |trial: &Trial<'_>| {
            let (first, rows) = (row, trial.draft.len() + 1);
            row += rows;
            let Some(drafter) = trial.drawn_from else { return verify(trial.draft, &choices[first..first + rows]) };
            let vocabulary = logits_rv.size()[1] as usize;
            let probabilities = torch::to_f32s(&sampler.probabilities(&logits_rv.narrow(0, first as i64, rows as i64)));
            let target: Vec<&[f32]> = probabilities.chunks(vocabulary).collect();
            verify_drawn(trial.draft, drafter, &target, &sampler.chances(trial.place, trial.draft.len()))
        };
        trials.iter().map(verdict).collect()
    })
}
