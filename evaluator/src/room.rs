//! Room for keys and values, asked for before it is taken.

use model::{KvCache, Transformer};

use crate::decode::DecodeError;

/// A cache of `model`'s keys and values: `lanes` texts side by side, each of up to `slots` tokens. `whose` names the model in messages.
///
/// # Errors
/// [`DecodeError::NoRoom`] when the device has less memory free, and what libtorch refuses.
pub(crate) fn allocate(whose: &'static str, model: &Transformer, lanes: usize, slots: usize) -> Result<KvCache, DecodeError> {
    let (kind, device) = (model.kind(), model.device());
    let bytes = KvCache::bytes(&model.config, lanes, slots, kind);
    let gigabytes = bytes as f64 / 1e9;
    torch::memory::check_room(bytes, device).map_err(|free| DecodeError::NoRoom {
        whose,
        lanes,
        slots,
        gigabytes,
        free: free as f64 / 1e9,
    })?;
    let doing = format!("allocating {gigabytes:.2} GB for the {whose}'s keys and values of {lanes} × {slots} tokens");
    Ok(torch::guarded(&doing, || KvCache::new(&model.config, lanes, slots, kind, device))?)
}
