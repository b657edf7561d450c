//! PyTorch's fused AdamW, one kernel over many tensors, which tch's generator leaves out (it skips `_fused_adam*`).
//!
//! Source: aten/src/ATen/native/FusedAdam.cpp and native/cpu/FusedAdamKernel.cpp in <https://github.com/pytorch/pytorch>.

use tch::{Kind, Tensor};

use crate::TorchError;
use crate::shim::{self, AdamWNumbers, ShimError};

/// Moves `params` by one AdamW step in place, with its moments; everything f32, on one device, the four lists matching in number and
/// shapes. `step` counts from one.
///
/// The gradients are multiplied by `gradient_scale` (clipping) on the way, and keep the scaled values.
#[allow(clippy::too_many_arguments)]
pub fn fused_adamw_step(
    params: &[Tensor],
    grads: &[Tensor],
    exp_avgs: &[Tensor],
    exp_avg_sqs: &[Tensor],
    step: u64,
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
    epsilon: f64,
    gradient_scale: f64,
) -> Result<(), TorchError> {
    let failed = |message: String| TorchError::Failed { doing: "taking an AdamW step".to_string(), message };
    let lists = [params, grads, exp_avgs, exp_avg_sqs];
    for (list, name) in lists.into_iter().zip(["parameters", "gradients", "first moments", "second moments"]) {
        if list.len() != params.len() {
            return Err(failed(format!("{} {name} for {} parameters", list.len(), params.len())));
        }
        for (index, (tensor, param)) in list.iter().zip(params).enumerate() {
            if tensor.kind() != Kind::Float || tensor.size() != param.size() {
                let (kind, size) = (tensor.kind(), tensor.size());
                return Err(failed(format!("number {index} of the {name} is {kind:?} {size:?}, not Float {:?}", param.size())));
            }
        }
    }
    let numbers = AdamWNumbers { step: step as f64, learning_rate, beta1, beta2, weight_decay, epsilon, gradient_scale };
    shim::fused_adamw(lists, &numbers).map_err(|error| match error {
        ShimError::Failed(message) => failed(message),
        ShimError::NotBuilt => failed("this program was built without it".to_string()),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::to_f32s;

    /// Steps of (gradient, gradient scale) from [1, -2, 3].
    fn stepped(gradients: [([f32; 3], f64); 2]) -> Vec<f32> {
        let params = [Tensor::from_slice(&[1_f32, -2.0, 3.0])];
        let moments = [[params[0].zeros_like()], [params[0].zeros_like()]];
        for (step, (gradient, scale)) in (1..).zip(gradients) {
            let grads = [Tensor::from_slice(&gradient)];
            fused_adamw_step(&params, &grads, &moments[0], &moments[1], step, 0.1, 0.9, 0.95, 0.01, 1e-8, scale).unwrap();
        }
        to_f32s(&params[0])
    }

    /// torch.optim.AdamW([1., -2., 3.], lr=0.1, betas=(0.9, 0.95), weight_decay=0.01), gradients [0.5, -1, 2] then [1, 1, -1].
    const GOLDEN: [f32; 3] = [0.802_302_4, -1.901_365_3, 2.867_266_2];

    fn assert_golden(values: &[f32]) {
        assert!(values.iter().zip(GOLDEN).all(|(ours, golden)| (ours - golden).abs() < 1e-6), "{values:?} against {GOLDEN:?}");
    }

    #[test]
    fn two_steps_equal_pytorchs_adamw() {
        assert_golden(&stepped([([0.5, -1.0, 2.0], 1.0), ([1.0, 1.0, -1.0], 1.0)]));
    }

    #[test]
    fn gradients_are_multiplied_by_their_scale() {
        // A factor on all gradients would cancel out of AdamW, so only the second step has one.
        assert_golden(&stepped([([0.5, -1.0, 2.0], 1.0), ([4.0, 4.0, -4.0], 0.25)]));
    }

    #[test]
    fn lists_that_do_not_match_are_refused() {
        let of = |length| [Tensor::zeros([length], (Kind::Float, tch::Device::Cpu))];
        let step = |grads: &[Tensor]| fused_adamw_step(&of(3), grads, &of(3), &of(3), 1, 0.1, 0.9, 0.95, 0.0, 1e-8, 1.0);
        assert!(step(&of(2)).unwrap_err().to_string().contains("number 0 of the gradients is Float [2], not Float [3]"));
        assert!(step(&[]).unwrap_err().to_string().contains("0 gradients for 1 parameters"));
    }
}
