//! Losses over logits and their gradients, by formula rather than by autograd: `[R, V]` logits live for one chunk of rows only.
//!
//! A loss is one function from a chunk's f32 logits `[R, V]` to the loss of each row `[R]` and its gradient with respect to the logits
//! `[R, V]`. Weights are applied by the caller (the crate's `head`).

use tch::{Kind, Tensor};

/// The loss of each row and its gradient.
pub struct RowLoss {
    pub loss_r: Tensor,
    pub gradient_rv: Tensor,
}

/// Cross entropy: `-log softmax(logits)[label]`; its gradient is `softmax - one_hot`.
pub fn cross_entropy(logits_rv: &Tensor, label_r: &Tensor) -> RowLoss {
    let label_r1 = label_r.unsqueeze(1);
    let log_probability_rv = logits_rv.log_softmax(-1, Kind::Float);
    let loss_r = -log_probability_rv.gather(1, &label_r1, false).squeeze_dim(1);
    let minus_one_r1 = label_r1.ones_like().to_kind(Kind::Float).neg();
    let gradient_rv = log_probability_rv.exp().scatter_add(1, &label_r1, &minus_one_r1);
    RowLoss { loss_r, gradient_rv }
}

/// How an unpruned drafter teaches a pruned one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distillation {
    /// Softens both distributions; the loss is multiplied by its square, so that the gradient keeps its size.
    pub temperature: f64,
    /// How far the gold token must lead the teacher's other logits; `None` takes the teacher as it is.
    pub margin: Option<f64>,
}

/// Forward divergence KL(teacher ‖ student) at a temperature, the teacher corrected where a margin is given ([`gold_corrected`]).
pub fn distillation(logits_rv: &Tensor, teacher_logits_rv: &Tensor, label_r: &Tensor, how: Distillation) -> RowLoss {
    let teacher_rv = match how.margin {
        Some(margin) => gold_corrected(teacher_logits_rv, label_r, margin) / how.temperature,
        None => teacher_logits_rv / how.temperature,
    };
    let log_teacher_rv = teacher_rv.log_softmax(-1, Kind::Float);
    let log_student_rv = (logits_rv / how.temperature).log_softmax(-1, Kind::Float);
    let teacher_rv = log_teacher_rv.exp();
    let squared = how.temperature * how.temperature;
    let loss_r = (&teacher_rv * (&log_teacher_rv - &log_student_rv)).sum_dim_intlist(-1, false, Kind::Float) * squared;
    let gradient_rv = (log_student_rv.exp() - teacher_rv) * how.temperature;
    RowLoss { loss_r, gradient_rv }
}

/// Total variation ½ Σ |teacher − student| between two distributions: the share of tokens that verification would refuse when drafts
/// are sampled. Its gradient is bounded, so that a few hopeless tokens do not outweigh the others (LK losses, arXiv 2602.23881).
pub fn total_variation(logits_rv: &Tensor, teacher_logits_rv: &Tensor) -> RowLoss {
    let student_rv = logits_rv.softmax(-1, Kind::Float);
    let difference_rv = &student_rv - teacher_logits_rv.softmax(-1, Kind::Float);
    let loss_r = difference_rv.abs().sum_dim_intlist(-1, false, Kind::Float) * 0.5;
    let sign_rv = difference_rv.sign() * 0.5;
    let mean_sign_r1 = (&student_rv * &sign_rv).sum_dim_intlist(-1, true, Kind::Float);
    RowLoss { loss_r, gradient_rv: student_rv * (sign_rv - mean_sign_r1) }
}

/// log softmax(logits)[label] of each row.
pub fn log_probability(logits_rv: &Tensor, label_r: &Tensor) -> Tensor {
    logits_rv.gather(1, &label_r.unsqueeze(1), false).squeeze_dim(1) - logits_rv.logsumexp(-1, false)
}

/// How the slots of a block share its loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PositionWeights {
    /// exp(-draft / γ), over their sum.
    Exponential,
    /// D-PACE (arXiv 2605.18810), over the number of blocks: see [`pace_weights`].
    Pace { alpha: f64 },
}

/// D-PACE weights of one block from the drafter's probabilities of its labels: `w_j = Σ_{m ≥ j} Π_{i ≤ m} s_i` with
/// `s_i = (1 − α) q_i + α`. A slot counts by how many more tokens are kept when it is right, as far as the drafter is able to now.
pub fn pace_weights(probabilities: &[f64], alpha: f64) -> Vec<f64> {
    let mut survival = 1.0;
    let mut weights: Vec<f64> = probabilities
        .iter()
        .map(|probability| {
            survival *= (1.0 - alpha) * probability + alpha;
            survival
        })
        .collect();
    for index in (1..weights.len()).rev() {
        weights[index - 1] += weights[index];
    }
    weights
}

/// Teacher logits whose gold entry is lifted to (best other + margin) wherever it does not lead by the margin; all else untouched.
pub fn gold_corrected(logits_rv: &Tensor, label_r: &Tensor, margin: f64) -> Tensor {
    let label_r1 = label_r.unsqueeze(1);
    let gold_r1 = logits_rv.gather(1, &label_r1, false);
    let lowest_r1 = gold_r1.full_like(f64::NEG_INFINITY);
    let best_other_r1 = logits_rv.scatter(1, &label_r1, &lowest_r1).amax(-1, true);
    let lifted_r1 = gold_r1.maximum(&(best_other_r1 + margin));
    logits_rv.scatter(1, &label_r1, &lifted_r1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use tch::Device;

    fn logits(seed: f64) -> Tensor {
        (Tensor::arange(15, (Kind::Float, Device::Cpu)).view([3, 5]) * seed).sin() * 2.0
    }

    fn labels() -> Tensor {
        Tensor::from_slice(&[1_i64, 4, 0])
    }

    fn assert_close(left: &Tensor, right: &Tensor, tolerance: f64) {
        let difference = f64::try_from((left - right).abs().max()).unwrap();
        assert!(difference < tolerance, "difference {difference}");
    }

    #[test]
    fn cross_entropy_equals_autograd() {
        let leaf = logits(1.3).set_requires_grad(true);
        let plain = leaf.cross_entropy_loss::<Tensor>(&labels(), None, tch::Reduction::Sum, -100, 0.0);
        plain.backward();
        let ours = cross_entropy(&leaf.detach(), &labels());
        assert_close(&ours.loss_r.sum(Kind::Float), &plain.detach(), 1e-6);
        assert_close(&ours.gradient_rv, &leaf.grad(), 1e-6);
    }

    #[test]
    fn distillation_equals_autograd() {
        let how = Distillation { temperature: 2.0, margin: Some(0.5) };
        let teacher = gold_corrected(&logits(0.7), &labels(), 0.5) / 2.0;
        let leaf = logits(1.3).set_requires_grad(true);
        let log_student = (&leaf / 2.0).log_softmax(-1, Kind::Float);
        let plain = log_student.kl_div(&teacher.softmax(-1, Kind::Float), tch::Reduction::Sum, false) * 4.0;
        plain.backward();
        let ours = distillation(&leaf.detach(), &logits(0.7), &labels(), how);
        assert_close(&ours.loss_r.sum(Kind::Float), &plain.detach(), 1e-5);
        assert_close(&ours.gradient_rv, &leaf.grad(), 1e-5);
    }

    #[test]
    fn total_variation_equals_autograd_and_is_nothing_between_equals() {
        let leaf = logits(1.3).set_requires_grad(true);
        let teacher = logits(0.7);
        let plain = (leaf.softmax(-1, Kind::Float) - teacher.softmax(-1, Kind::Float)).abs().sum(Kind::Float) * 0.5;
        plain.backward();
        let ours = total_variation(&leaf.detach(), &teacher);
        assert_close(&ours.loss_r.sum(Kind::Float), &plain.detach(), 1e-6);
        assert_close(&ours.gradient_rv, &leaf.grad(), 1e-6);
        let same = total_variation(&teacher, &teacher);
        assert_close(&same.loss_r, &Tensor::zeros([3], (Kind::Float, Device::Cpu)), 1e-7);
        // All of the mass moved: nothing in common is 1.
        let apart =
            total_variation(&Tensor::from_slice(&[50_f32, 0.0]).view([1, 2]), &Tensor::from_slice(&[0_f32, 50.0]).view([1, 2]));
        assert_close(&apart.loss_r, &Tensor::ones([1], (Kind::Float, Device::Cpu)), 1e-6);
    }

    #[test]
    fn pace_weights_of_known_values() {
        // s = 0.75, 0.5, 1; products 0.75, 0.375, 0.375.
        assert_eq!(pace_weights(&[0.5, 0.0, 1.0], 0.5), [1.5, 0.75, 0.375]);
        // Alone the last slot's weight is its survival; with α = 1 every slot survives.
        assert_eq!(pace_weights(&[0.2, 0.9, 0.4], 1.0), [3.0, 2.0, 1.0]);
        assert_eq!(pace_weights(&[0.25], 0.0), [0.25]);
        assert!(pace_weights(&[], 0.5).is_empty());
    }

    #[test]
    fn log_probabilities_are_those_of_the_labels() {
        let expected = -cross_entropy(&logits(1.3), &labels()).loss_r;
        assert_close(&log_probability(&logits(1.3), &labels()), &expected, 1e-6);
    }

    #[test]
    fn equal_models_have_no_divergence() {
        // The gold tokens lead by far, so that the correction leaves the teacher alone.
        let same = Tensor::from_slice(&[0_f32, 9.0, 1.0, 2.0, 9.0, 1.0]).view([2, 3]);
        let gold = Tensor::from_slice(&[1_i64, 1]);
        let ours = distillation(&same, &same, &gold, Distillation { temperature: 1.0, margin: Some(0.5) });
        assert_close(&ours.loss_r, &Tensor::zeros([2], (Kind::Float, Device::Cpu)), 1e-7);
        assert_close(&ours.gradient_rv, &same.zeros_like(), 1e-7);
    }

    #[test]
    fn the_gold_logit_leads_by_exactly_the_margin_where_it_did_not() {
        let teacher =
            Tensor::from_slice(&[1_f32, 3.0, 2.0, /* leads by 2 */ 5.0, 3.0, 1.0, /* leads by 0.25 */ 1.0, 0.75, 0.0])
                .view([3, 3]);
        let corrected = gold_corrected(&teacher, &Tensor::from_slice(&[0_i64, 0, 0]), 0.5);
        let expected = [3.5, 3.0, 2.0, 5.0, 3.0, 1.0, 1.25, 0.75, 0.0];
        assert_eq!(torch::to_f32s(&corrected), expected);
    }
}
