//! The drafter's side of decoding: for each text what its cache holds, the draft under verification, and what is ready for its outcome.
//!
//! Lockstep decoding asks it for an answer on the target's own timeline; [`crate::asynchronous`] runs it on a second thread, where it
//! drafts ahead between two answers. All texts that need a block are drafted in one forward, and all their packs in another.

use std::time::Instant;

use model::KvCache;

use crate::decode::{DecodeError, LaneNews, News, Proposal, Span};
use crate::drafter::{Block, Drafter, LaneWork};
use crate::fan_out::{Continuation, Draft, FanOut, Lookup, look_up};
use crate::room::allocate;
use crate::sampling::{Sampler, TokenPlace};
use crate::verification::Verdict;

/// What the drafter knows of the texts under way, one a lane.
pub(crate) struct Drafting<'d> {
    drafter: &'d Drafter,
    cache: KvCache,
    lanes: Vec<Lane>,
    /// Absent where nothing is drafted ahead.
    fan_out: Option<FanOut>,
    /// What draws the drafts; absent where they are the likeliest tokens.
    drawn_by: Option<Sampler>,
    /// When the last forward was done.
    idle_since: Instant,
}

#[derive(Default)]
struct Lane {
    /// Index of the text's prompt.
    prompt: usize,
    /// Tokens of the text that are known, the anchor of the round under way the last of them.
    known: usize,
    /// The round under way.
    anchor: u32,
    draft: Draft,
    ahead: Option<Ahead>,
}

/// What is ready for the outcomes of the round under way; the cache holds its block, as clean tokens.
struct Ahead {
    /// Tokens in the cache before the round's block.
    prefix: usize,
    prepared: Vec<(Continuation, Draft)>,
    pack: Span,
}

impl<'d> Drafting<'d> {
    /// Room for `lanes` texts of up to `slots` tokens, prompts included, and for what one forward drafts behind them.
    pub(crate) fn cache(drafter: &Drafter, lanes: usize, slots: usize, fan_out: Option<&FanOut>) -> Result<KvCache, DecodeError> {
        // Without a pack the block under verification is taken in beside the block drafted next.
        let blocks = 1 + fan_out.map_or(0, |fan_out| fan_out.most_blocks(drafter.block_size)).max(1);
        allocate("drafter", &drafter.model, lanes, slots.saturating_add(blocks * drafter.block_size))
    }

    /// Drafts for as many texts as there are lanes in `cache`, which [`Drafting::cache`] has made for the same fan-out.
    pub(crate) fn new(drafter: &'d Drafter, cache: KvCache, fan_out: Option<&FanOut>, drawn_by: Option<&Sampler>) -> Self {
        Self {
            drafter,
            lanes: (0..cache.lanes()).map(|_| Lane::default()).collect(),
            cache,
            fan_out: fan_out.cloned(),
            drawn_by: drawn_by.cloned(),
            idle_since: Instant::now(),
        }
    }

    /// A new text begins with this prompt: its index and its ids.
    pub(crate) fn start(&mut self, lane: usize, (prompt, ids): (usize, &[u32])) -> Result<(), DecodeError> {
        self.lanes[lane] = Lane { prompt, ..Lane::default() };
        self.cache.set_length(lane, 0);
        self.drafter.draft(&mut self.cache, &[LaneWork { lane, clean: ids, blocks: &[] }], 1)?;
        self.idle_since = Instant::now();
        Ok(())
    }

    /// The next draft of each of these texts: from what is ready if the outcome is among it, else from a block drafted now.
    pub(crate) fn answer(&mut self, news: &[LaneNews]) -> Result<Vec<Proposal>, DecodeError> {
        let bubble_seconds = self.idle_since.elapsed().as_secs_f64();
        let mut proposals = Vec::with_capacity(news.len());
        // Lanes whose draft was not ready, with the tokens that their cache lacks.
        let mut missed: Vec<(usize, Vec<u32>)> = Vec::new();
        for &LaneNews { lane: index, news } in news {
            let lane = &mut self.lanes[index];
            let (anchor, found, lacking, pack) = match (news, lane.ahead.take()) {
                (News::First(token), _) => (token, Err(Lookup::First), Vec::new(), None),
                (News::Outcome(verdict), Some(ahead)) => {
                    // The pack's clean rows that the target accepted are committed text now.
                    self.cache.set_length(index, ahead.prefix + 1 + verdict.accepted);
                    let pack = (ahead.pack, ahead.prepared.len());
                    (verdict.next, look_up(ahead.prepared, &verdict, lane.draft.tokens.len()), Vec::new(), Some(pack))
                }
                (News::Outcome(Verdict { accepted, next }), None) => {
                    let committed = std::iter::once(lane.anchor).chain(lane.draft.tokens[..accepted].iter().copied()).collect();
                    let full = accepted == lane.draft.tokens.len();
                    (next, Err(if full { Lookup::FullAcceptance } else { Lookup::BeyondPositions }), committed, None)
                }
            };
            lane.anchor = anchor;
            lane.known += match news {
                News::First(_) => 1,
                News::Outcome(verdict) => verdict.accepted + 1,
            };
            let lookup = match found {
                Ok(draft) => {
                    lane.draft = draft;
                    Lookup::Hit
                }
                Err(cause) => {
                    missed.push((index, lacking));
                    cause
                }
            };
            let lookup = self.fan_out.is_some().then_some(lookup);
            proposals.push(Proposal { lookup, pack, bubble_seconds, ..Proposal::default() });
        }
        let drafted = self.draft_missed(&missed)?;
        for (proposal, &LaneNews { lane, .. }) in proposals.iter_mut().zip(news) {
            let draft = &mut self.lanes[lane].draft;
            proposal.tokens.clone_from(&draft.tokens);
            proposal.drawn_from = draft.drawn_from.take().map(|rows| rows.to_rows()).transpose()?;
            proposal.draft = drafted.filter(|_| missed.iter().any(|(index, _)| *index == lane));
        }
        self.idle_since = Instant::now();
        Ok(proposals)
    }

    /// Drafts the next block of each of these lanes in one forward, behind the tokens that their cache lacks.
    fn draft_missed(&mut self, missed: &[(usize, Vec<u32>)]) -> Result<Option<Span>, DecodeError> {
        if missed.is_empty() {
            return Ok(None);
        }
        let start = Instant::now();
        let blocks: Vec<Block> =
            missed.iter().map(|(lane, clean)| Block { anchor: self.lanes[*lane].anchor, context: clean.len() }).collect();
        let work: Vec<LaneWork<'_>> = missed
            .iter()
            .zip(&blocks)
            .map(|((lane, clean), block)| LaneWork { lane: *lane, clean, blocks: std::slice::from_ref(block) })
            .collect();
        let firsts = missed.iter().map(|(lane, _)| self.lanes[*lane].place(0)).collect();
        let drafts = self.draft(&work, firsts)?;
        for ((lane, _), draft) in missed.iter().zip(drafts) {
            self.lanes[*lane].draft = draft;
        }
        Ok(Some(Span::since(start)))
    }

    /// One pack for all these lanes: the blocks under verification as clean tokens, and a block for each continuation of the fan-out.
    pub(crate) fn draft_ahead(&mut self, lanes: &[usize]) -> Result<(), DecodeError> {
        let Some(fan_out) = &self.fan_out else { return Ok(()) };
        let start = Instant::now();
        let block_size = self.drafter.block_size;
        let packs: Vec<Pack> = lanes
            .iter()
            .map(|&index| {
                let lane = &self.lanes[index];
                let clean = std::iter::once(lane.anchor).chain(lane.draft.tokens.iter().copied()).collect();
                let continuations = fan_out.continuations(&lane.draft, block_size);
                let blocks = continuations.iter().map(|it| Block { anchor: it.anchor, context: it.context }).collect();
                Pack { lane: index, prefix: self.cache.length(index), clean, continuations, blocks }
            })
            .filter(|pack| !pack.blocks.is_empty())
            .collect();
        if packs.is_empty() {
            return Ok(());
        }
        let work: Vec<LaneWork<'_>> =
            packs.iter().map(|pack| LaneWork { lane: pack.lane, clean: &pack.clean, blocks: &pack.blocks }).collect();
        // A block's context begins with the last known token, and its anchor stands right behind the context, so its first prediction is
        // as many places behind the first unknown token as the context is long.
        let firsts =
            packs.iter().flat_map(|pack| pack.blocks.iter().map(|block| self.lanes[pack.lane].place(block.context))).collect();
        let mut drafts = self.draft(&work, firsts)?.into_iter();
        let span = Span::since(start);
        for Pack { lane, prefix, continuations, .. } in packs {
            let prepared = continuations.into_iter().zip(drafts.by_ref()).collect();
            self.lanes[lane].ahead = Some(Ahead { prefix, prepared, pack: span });
        }
        self.idle_since = Instant::now();
        Ok(())
    }

    /// The drafts of all blocks of this work; `firsts` are the places of their first tokens.
    fn draft(&mut self, work: &[LaneWork<'_>], firsts: Vec<TokenPlace>) -> Result<Vec<Draft>, DecodeError> {
        let ranked = self.fan_out.as_ref().map_or(1, FanOut::ranked);
        Ok(match &self.drawn_by {
            None => self.drafter.draft(&mut self.cache, work, ranked)?,
            Some(sampler) => self.drafter.draft_drawn(&mut self.cache, work, ranked, sampler, &firsts)?,
        })
    }
}

impl Lane {
    /// The token so many places behind the one that follows the last known one.
    fn place(&self, behind: usize) -> TokenPlace {
        TokenPlace { request: self.prompt as u64, position: self.known + behind }
    }
}

/// One lane's part of a pack.
struct Pack {
    lane: usize,
    prefix: usize,
    clean: Vec<u32>,
    continuations: Vec<Continuation>,
    blocks: Vec<Block>,
}
