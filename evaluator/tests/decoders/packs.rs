//! A drafter's one forward, in all its uses, gives what separate forwards give.

use evaluator::drafter::{Block, LaneWork};
use evaluator::fan_out::{Candidate, Draft, FanOut};
use evaluator::sampling::TokenPlace;
use evaluator::{Drafter, Sampler};

use crate::models::{LABELS, assert_close, fresh_block, fresh_causal, fresh_ranking, noisy_drafter, random_model};

#[test]
fn the_reference_sees_what_it_should() {
    let model = random_model(12, 2, 4);
    let long = fresh_causal(&model, &[1, 2, 3, 4, 5]);
    assert_close(&long.narrow(0, 0, 3), &fresh_causal(&model, &[1, 2, 3]));
    // The anchor of a block sees the masks behind it, so its logits are not the causal ones.
    let drafter = noisy_drafter(&model, 0.0, 3, LABELS[1], 1);
    let first_slot = fresh_block(&drafter, &[1, 2], 3).narrow(0, 0, 1);
    assert!((first_slot - long.narrow(0, 2, 1)).abs().max().double_value(&[]) > 1e-2);
}

#[test]
fn every_continuation_of_a_pack_equals_its_own_forward() {
    let _no_grad = tch::no_grad_guard();
    for seed in 0..6 {
        let labels = LABELS[seed as usize % 2];
        let block_size = 2 + seed as usize % 5;
        let drafter = noisy_drafter(&random_model(14, 2, seed), 0.2, block_size, labels, seed + 50);
        let prefix = [3, 1, 4, 1, 5, 9, 2];
        let anchor = 6;
        let mut cache = drafter.new_cache(1, prefix.len(), 40 * block_size);
        drafter.draft(&mut cache, &[LaneWork { lane: 0, clean: &prefix, blocks: &[] }], 1).unwrap();
        let block = Block { anchor, context: 0 };
        let draft = drafter.draft(&mut cache, &[LaneWork { lane: 0, clean: &[], blocks: &[block] }], 4).unwrap().remove(0);
        assert_eq!(draft.tokens.len(), block_size - 1);

        let clean = [&[anchor], &draft.tokens[..]].concat();
        let continuations = FanOut::Rectangle { positions: 11, candidates: 3 }.continuations(&draft, block_size);
        assert!(continuations.len() > draft.tokens.len(), "{continuations:?}");
        let blocks: Vec<Block> = continuations.iter().map(|it| Block { anchor: it.anchor, context: it.context }).collect();
        let (logits, count) = drafter.logits(&cache, &[LaneWork { lane: 0, clean: &clean, blocks: &blocks }]).unwrap();
        assert_eq!(count, blocks.len());
        let used = (block_size - drafter.first_used_slot()) as i64;
        for (number, block) in blocks.iter().enumerate() {
            let text = [&prefix[..], &clean[..block.context]].concat();
            let expected = fresh_block(&drafter, &text, block.anchor).narrow(0, drafter.first_used_slot() as i64, used);
            assert_close(&logits.narrow(0, number as i64 * used, used), &expected);
        }
    }
}

#[test]
fn the_clean_tokens_of_a_pack_stay_as_far_as_they_are_accepted() {
    let _no_grad = tch::no_grad_guard();
    for labels in LABELS {
        let drafter = noisy_drafter(&random_model(14, 3, 2), 0.2, 4, labels, 9);
        let prefix = [3, 1, 4, 1];
        let mut cache = drafter.new_cache(1, 20, 40);
        drafter.draft(&mut cache, &[LaneWork { lane: 0, clean: &prefix, blocks: &[] }], 1).unwrap();
        // Four clean tokens go in beside two blocks; three of them are accepted, then a block is drafted behind another token.
        let blocks = [Block { anchor: 2, context: 1 }, Block { anchor: 7, context: 4 }];
        drafter.draft(&mut cache, &[LaneWork { lane: 0, clean: &[5, 9, 2, 6], blocks: &blocks }], 2).unwrap();
        assert_eq!(cache.length(0), 8);
        cache.set_length(0, 7);
        let work = LaneWork { lane: 0, clean: &[8, 3], blocks: &[Block { anchor: 11, context: 2 }] };
        let (logits, _) = drafter.logits(&cache, &[work]).unwrap();
        let first = drafter.first_used_slot() as i64;
        assert_close(&logits, &fresh_block(&drafter, &[3, 1, 4, 1, 5, 9, 2, 8, 3], 11).narrow(0, first, 4 - first));
    }
}

#[test]
fn lanes_do_not_see_each_other() {
    let _no_grad = tch::no_grad_guard();
    let drafter = noisy_drafter(&random_model(14, 2, 1), 0.2, 3, LABELS[0], 9);
    let texts: [&[u32]; 3] = [&[3, 1, 4], &[1, 5, 9, 2, 6], &[5]];
    let mut cache = drafter.new_cache(4, 8, 8);
    // Lane 2 is left out, and lane 3 has held a longer text before.
    cache.set_length(3, 6);
    cache.set_length(3, 0);
    let blocks: Vec<Block> = texts.iter().map(|text| Block { anchor: 7, context: text.len() }).collect();
    let lanes = [0, 1, 3];
    let work: Vec<LaneWork<'_>> = (0..3)
        .map(|index| LaneWork { lane: lanes[index], clean: texts[index], blocks: std::slice::from_ref(&blocks[index]) })
        .collect();
    let (logits, _) = drafter.logits(&cache, &work).unwrap();
    for (index, text) in texts.iter().enumerate() {
        assert_close(&logits.narrow(0, index as i64 * 2, 2), &fresh_block(&drafter, text, 7).narrow(0, 1, 2));
    }
    drafter.draft(&mut cache, &work, 1).unwrap();
    assert_eq!((0..4).map(|lane| cache.length(lane)).collect::<Vec<_>>(), [3, 5, 0, 1]);
}

#[test]
fn a_draft_is_ranked_by_score_and_keeps_the_guess_of_the_bonus_token_apart() {
    let _no_grad = tch::no_grad_guard();
    for labels in LABELS {
        let drafter = noisy_drafter(&random_model(14, 2, 3), 0.2, 4, labels, 9);
        let mut cache = drafter.new_cache(1, 8, 8);
        let work = LaneWork { lane: 0, clean: &[3, 1], blocks: &[Block { anchor: 4, context: 2 }] };
        let draft: Draft = drafter.draft(&mut cache, &[work], 3).unwrap().remove(0);
        let ranked: Vec<Vec<u32>> = fresh_ranking(&drafter, &[3, 1], 4).into_iter().map(|slot| slot[..3].to_vec()).collect();
        let tokens = |slot: &Vec<Candidate>| slot.iter().map(|it| it.token).collect::<Vec<u32>>();
        assert_eq!(draft.ranked.iter().map(tokens).collect::<Vec<_>>(), ranked[..3]);
        assert_eq!(draft.tokens, ranked[..3].iter().map(|best| best[0]).collect::<Vec<_>>());
        assert_eq!(draft.bonus.as_ref().map(tokens).as_ref(), ranked.get(3));
        assert_eq!(draft.bonus.is_some(), labels == LABELS[1]);
    }
}

#[test]
fn candidates_have_the_probabilities_of_their_slot_at_its_temperature() {
    let _no_grad = tch::no_grad_guard();
    for temperatures in [vec![], vec![0.5, 1.0, 4.0]] {
        let drafter =
            Drafter { temperatures: temperatures.clone(), ..noisy_drafter(&random_model(14, 2, 3), 0.2, 4, LABELS[0], 9) };
        let mut cache = drafter.new_cache(1, 8, 12);
        let blocks = [Block { anchor: 4, context: 2 }, Block { anchor: 5, context: 2 }];
        let drafts = drafter.draft(&mut cache, &[LaneWork { lane: 0, clean: &[3, 1], blocks: &blocks }], 3).unwrap();
        for (draft, block) in drafts.iter().zip(blocks) {
            let logits_sv = fresh_block(&drafter, &[3, 1], block.anchor);
            for (index, slot) in draft.ranked.iter().enumerate() {
                let temperature = f64::from(temperatures.get(index).copied().unwrap_or(1.0));
                let expected = (logits_sv.get(index as i64 + 1) / temperature).softmax(-1, tch::Kind::Float);
                for candidate in slot {
                    let expected = expected.double_value(&[i64::from(candidate.token)]);
                    assert!((f64::from(candidate.probability) - expected).abs() < 1e-5, "{candidate:?} {expected}");
                }
            }
        }
    }
}

#[test]
fn a_drawn_draft_is_drawn_from_its_own_block_at_its_own_place() {
    let _no_grad = tch::no_grad_guard();
    let sampler = Sampler { temperature: 1.5, top_p: 0.95, top_k: 11, seed: 5 };
    let mut outside = 0;
    for (labels, ranked) in [(LABELS[0], 1), (LABELS[0], 3), (LABELS[1], 1), (LABELS[1], 3)] {
        let drafter = noisy_drafter(&random_model(14, 2, 3), 0.2, 5, labels, 9);
        let mut cache = drafter.new_cache(2, 8, 15);
        let blocks = [Block { anchor: 4, context: 2 }, Block { anchor: 5, context: 1 }, Block { anchor: 6, context: 1 }];
        let work =
            [LaneWork { lane: 1, clean: &[3, 1], blocks: &blocks[..2] }, LaneWork { lane: 0, clean: &[7], blocks: &blocks[2..] }];
        let firsts = [(8, 20), (8, 3), (9, 20)].map(|(request, position)| TokenPlace { request, position });
        let drafts = drafter.draft_drawn(&mut cache, &work, ranked, &sampler, &firsts).unwrap();
        let likeliest = drafter.draft(&mut drafter.new_cache(2, 8, 15), &work, ranked).unwrap();
        for (index, prefix) in [&[3, 1][..], &[3], &[7]].into_iter().enumerate() {
            let draft = &drafts[index];
            let logits = fresh_block(&drafter, prefix, blocks[index].anchor).narrow(0, drafter.first_used_slot() as i64, 4);
            let probabilities = sampler.probabilities(&logits);
            let places: Vec<TokenPlace> =
                (0..4).map(|slot| TokenPlace { position: firsts[index].position + slot, ..firsts[index] }).collect();
            assert_eq!(draft.tokens, sampler.draw_drafts(&probabilities, &places));
            let rows = draft.drawn_from.as_ref().unwrap().to_rows().unwrap().concat();
            assert_close(&tch::Tensor::from_slice(&rows).view([4, 14]), &probabilities);
            assert_eq!(draft.bonus, likeliest[index].bonus);
            for (slot, token) in draft.tokens.iter().enumerate() {
                let (found, best) = (&draft.ranked[slot], &likeliest[index].ranked[slot]);
                assert_eq!(found[..ranked], best[..]);
                let place = found.iter().position(|it| it.token == *token).unwrap();
                assert!(found.len() == ranked.max(place + 1) && found[place].probability <= found[0].probability);
                outside += usize::from(place == ranked);
            }
        }
    }
    assert!(outside > 3, "{outside}");
}

#[test]
fn a_token_outside_the_vocabulary_is_an_error() {
    let drafter = noisy_drafter(&random_model(14, 2, 3), 0.2, 4, LABELS[0], 9);
    let mut cache = drafter.new_cache(1, 8, 8);
    let error = drafter.draft(&mut cache, &[LaneWork { lane: 0, clean: &[99], blocks: &[] }], 1).unwrap_err();
    assert!(error.to_string().contains("drafting"), "{error}");
    assert_eq!(cache.length(0), 0);
}
