//! The conversations are had: by the target itself, loaded here and on every other rank, or by servers that have it. Ranks share the
//! chunks of the work; whose a chunk is shows nowhere in its part, so that the next start may have another number of ranks.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use configs::Engine;
use data::conversations::{self, Asking, Common, Done};
use data::engine::Conversations;
use data::preparation::Prepared;
use data::requests::count_rows;
use evaluator::generate::{GenerateSettings, generate, lanes_with_room};
use evaluator::sampling::Sampler;
use model::{KvCache, Transformer};

use super::{WORK, provenance, servers, write_parts};
use crate::models::{self, Text};
use crate::stages::{Context, Stage};

/// How often the parts of other ranks are counted.
const LOOK: Duration = Duration::from_secs(2);

/// On rank 0: has all conversations that are left, together with the other ranks; whether all are through.
pub(super) fn all(context: &Context<'_>, text: &Text, prepared: &Prepared, may_be_refused: usize) -> anyhow::Result<bool> {
    let is_through = |chunk| conversations::is_through(&context.folder, chunk);
    if (0..prepared.chunks).all(is_through) {
        return Ok(true);
    }
    if shared(context) {
        context.begin_together(Stage::Regenerate)?;
    }
    share(context, text, prepared, may_be_refused)?;
    conversations::limit_refused(&context.folder, 0..prepared.chunks, may_be_refused)?;
    Ok((0..prepared.chunks).all(is_through))
}

/// Whether every rank has an engine of its own.
fn shared(context: &Context<'_>) -> bool {
    context.recipe.regenerate.engine == Engine::Builtin && !context.group.is_alone()
}

/// On every rank: has the conversations of its share, and waits until the others have theirs.
pub(super) fn share(context: &Context<'_>, text: &Text, prepared: &Prepared, may_be_refused: usize) -> anyhow::Result<()> {
    let recipe = context.recipe;
    let ranks = if shared(context) { context.group.world() } else { 1 };
    let (own, others): (Vec<usize>, Vec<usize>) = (0..prepared.chunks).partition(|chunk| chunk % ranks == context.group.rank());
    let missing = own.iter().any(|&chunk| !conversations::is_through(&context.folder, chunk));
    let target = match recipe.regenerate.engine {
        Engine::Builtin if missing => Some(models::target_on(recipe, context.own_device(&recipe.devices.target)?)?),
        _ => None,
    };
    let stop_tokens = models::model_config(&recipe.target.model)?.eos_token_id;
    let provenance = provenance(context, text);
    let common = Common {
        folder: &context.folder,
        work: &context.folder.join(WORK),
        provenance: &provenance,
        tokenizer: &text.tokenizer,
        template: &text.template,
        thinking: recipe.target.thinking,
        temperature: recipe.regenerate.temperature,
        max_tokens: recipe.data.max_tokens,
        stop_tokens: &stop_tokens,
        may_be_refused,
    };
    let bar = context.leads().then(|| context.progress.bar("regenerate", prepared.rows_used));
    let begun = Instant::now();
    let (done, by_server) = (Cell::new(Done::default()), RefCell::new(String::new()));
    let others = RefCell::new(Others { chunks: others, rows: 0, looked: None });
    let show = || {
        let Some(bar) = &bar else { return };
        let rate = done.get().tokens as f64 / begun.elapsed().as_secs_f64();
        let of_ranks = if ranks > 1 { format!(" on each of {ranks} ranks") } else { String::new() };
        let rows = done.get().conversations + others.borrow_mut().rows(&common);
        bar.set(rows, &format!("{rate:.0} tokens/s{of_ranks}{}", by_server.borrow()));
    };
    let mut listed = Ok(());
    let mut progress = |now: Done| {
        if now.chunks != done.replace(now).chunks && listed.is_ok() && context.leads() {
            listed = write_parts(context, prepared);
        }
        show();
    };
    let mut asking = Asking::new(common, &own, &mut progress)?;
    let generated = match (&target, &bar) {
        (Some(target), _) => built_in(context, target, prepared, &mut asking),
        (None, Some(bar)) if missing => servers::answer(context, &stop_tokens, &mut asking, bar, &mut |servers| {
            by_server.replace(servers);
            show();
        }),
        _ => Ok(()),
    };
    // What is answered is kept, whatever ended the rest; and what went wrong with answers says more than the engine that was stopped.
    asking.finish()?;
    generated?;
    listed?;
    if shared(context) {
        context.group.meet(&mut || show())?;
        others.borrow_mut().looked = None;
        show();
    }
    Ok(())
}

/// The chunks of other ranks, as the files show them.
struct Others {
    /// Those that are not through yet.
    chunks: Vec<usize>,
    /// Conversations of those that are.
    rows: usize,
    looked: Option<Instant>,
}

impl Others {
    /// How many conversations the other ranks are through with.
    fn rows(&mut self, common: &Common<'_>) -> usize {
        if self.looked.is_none_or(|looked| looked.elapsed() >= LOOK) {
            self.looked = Some(Instant::now());
            let (through, left): (Vec<usize>, Vec<usize>) =
                self.chunks.iter().partition(|&&chunk| conversations::is_through(common.folder, chunk));
            // This is shown and nothing else: a chunk that cannot be read counts once its own rank says why.
            self.rows += through.iter().filter_map(|&chunk| count_rows(common.work, chunk).ok()).sum::<usize>();
            self.chunks = left;
        }
        self.rows
    }
}

/// The built-in engine: the target itself, here.
fn built_in(
    context: &Context<'_>,
    target: &Transformer,
    prepared: &Prepared,
    conversations: &mut dyn Conversations,
) -> anyhow::Result<()> {
    let sampling = &context.recipe.regenerate;
    let slots = prepared.longest_prompt.saturating_add(sampling.max_new_tokens);
    let lanes =
        sampling.batch_rows.unwrap_or_else(|| lanes_with_room(target, slots, context.group.world())).min(prepared.rows_used);
    let gigabytes = KvCache::bytes(&target.config, lanes, slots, target.kind()) as f64 / 1e9;
    context.progress.note(&format!(
        "{:>12} up to {lanes} answers at once, each with room for {slots} tokens: {gigabytes:.2} GB of keys and values",
        "regenerate"
    ));
    let settings = GenerateSettings {
        sampler: Sampler {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            seed: context.recipe.seed,
        },
        stop_tokens: target.config.eos_token_id.clone(),
        max_new_tokens: sampling.max_new_tokens,
        longest_prompt: prepared.longest_prompt,
        lanes,
    };
    Ok(generate(target, conversations, &settings, context.stop)?)
}
