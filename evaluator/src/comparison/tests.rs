#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::budget::{Measured, Resolved};
use crate::report::check_well_formed;
use crate::score::{DecoderScore, Divergence};

/// The figures of prompts that took `rounds[i]` rounds for 60 tokens, each of `seconds`.
fn benchmark(rounds: &[usize], seconds: f64) -> BenchmarkScore {
    let by_prompt: Vec<PromptFigures> =
        rounds.iter().map(|&rounds| PromptFigures { rounds, committed: 60, seconds: rounds as f64 * seconds }).collect();
    let rounds: usize = by_prompt.iter().map(|it| it.rounds).sum();
    let tau = (60 * by_prompt.len()) as f64 / rounds as f64;
    BenchmarkScore {
        prompts: by_prompt.len(),
        tokens: 61 * by_prompt.len(),
        rounds,
        tau_pooled: tau,
        tau_interval: Some((tau - 0.1, tau + 0.1)),
        tokens_per_second: tau / seconds,
        speedup: Some(tau * 0.02 / seconds),
        speedup_interval: Some((tau * 0.019 / seconds, tau * 0.021 / seconds)),
        hit_rate: Some(0.5),
        identical_to_autoregressive: Some(true),
        prompts_hash: "same".to_string(),
        by_prompt,
        ..BenchmarkScore::default()
    }
}

/// A score whose drafting decoders took `rounds[i]` rounds of `seconds` for each prompt, and whose target alone takes 0.02 s a token.
fn entry(label: &str, layers: usize, rounds: &[usize], seconds: f64) -> Entry {
    let decoder = |figures| DecoderScore { benchmarks: BTreeMap::from([("gsm8k".to_string(), figures)]) };
    let alone = BenchmarkScore { speedup: None, hit_rate: None, ..benchmark(&vec![60; rounds.len()], 0.02) };
    let packs = 0.0123 * rounds.iter().sum::<usize>() as f64;
    let score = Score {
        checkpoint: label.to_string(),
        kind: "d3d".to_string(),
        target: "small.gguf".to_string(),
        thinking: Some(false),
        dtype: "f32".to_string(),
        drafter_dtype: "bf16".to_string(),
        block_size: 8,
        layers,
        parameters: Some(134_500_000),
        fan_out: "best_first, 24 blocks".to_string(),
        budget: None,
        calibration: None,
        hit_rate_by_blocks: BTreeMap::new(),
        concurrency: 1,
        drafts: "point".to_string(),
        temperature: 0.0,
        sampling: String::new(),
        decoders: BTreeMap::from([
            (ALONE.to_string(), decoder(alone)),
            ("lockstep".to_string(), decoder(benchmark(rounds, seconds * 1.5))),
            (RANKED.to_string(), decoder(BenchmarkScore { pack_seconds: packs, ..benchmark(rounds, seconds) })),
        ]),
    };
    Entry { label: label.to_string(), run: Some("run".to_string()), score }
}

fn figures_of<'e>(entry: &'e mut Entry, decoder: &str) -> &'e mut BenchmarkScore {
    entry.score.decoders.get_mut(decoder).unwrap().benchmarks.get_mut("gsm8k").unwrap()
}

/// Rounds of 40 prompts, easy and hard ones, each `more` rounds longer than usual.
fn rounds(more: impl Fn(usize) -> usize) -> Vec<usize> {
    (0..40).map(|prompt| 15 + prompt % 20 + more(prompt)).collect()
}

/// How the second differs from the first with the asynchronous decoder.
fn difference_of(entries: &[Entry]) -> Difference {
    let comparison = compare(entries, None, &[]).unwrap();
    let row = comparison.rows.iter().find(|row| row.label == entries[1].label && row.decoder == RANKED);
    row.unwrap().difference.clone().unwrap()
}

#[test]
fn prompts_are_paired() {
    // The prompts differ far more among themselves than the two scores do on any of them, so that only pairs can show it.
    let (one, other) = (entry("one", 30, &rounds(|_| 1), 0.03), entry("other", 30, &rounds(|_| 0), 0.03));
    let difference = difference_of(&[one.clone(), other.clone()]);
    let (tau, speed) = (difference.tau.unwrap(), difference.speed_ratio.unwrap());
    let (of_one, of_other) = (2400.0 / 1020.0, 2400.0 / 980.0);
    assert_eq!(difference.prompts, 40);
    assert!((tau.value - (of_other - of_one)).abs() < 1e-12 && (speed.value - of_other / of_one).abs() < 1e-12);
    let (low, high) = tau.interval.unwrap();
    assert!(0.0 < low && low < tau.value && tau.value < high && high - low < 0.05, "{low} {high}");
    assert_eq!((tau.verdict, speed.verdict), (Some(Verdict::Better), Some(Verdict::Better)));
    assert_eq!(difference.notes, Vec::<String>::new());
    // The other way round.
    let difference = difference_of(&[other.clone(), one]);
    assert_eq!(difference.tau.unwrap().verdict, Some(Verdict::Worse));
    assert_eq!(difference.speed_ratio.unwrap().verdict, Some(Verdict::Worse));
    // A prompt that took no round of either side says nothing.
    let mut without = Entry { label: "without".to_string(), ..other.clone() };
    figures_of(&mut without, RANKED).by_prompt[3] = PromptFigures::default();
    assert_eq!(difference_of(&[other, without]).prompts, 39);
}

#[test]
fn there_is_a_verdict_exactly_where_the_interval_excludes_equality() {
    let mut seen = [0; 3];
    for gain in 0..12 {
        // From round about to always better by a round.
        let ours = rounds(|prompt| if prompt % 12 < gain { 0 } else { 2 * (prompt % 2) });
        let difference = difference_of(&[entry("one", 30, &rounds(|_| 1), 0.03), entry("other", 30, &ours, 0.03)]);
        for (estimate, equal) in [(difference.tau.unwrap(), 0.0), (difference.speed_ratio.unwrap(), 1.0)] {
            let (low, high) = estimate.interval.unwrap();
            let expected = match (low > equal, high < equal) {
                (true, _) => Verdict::Better,
                (_, true) => Verdict::Worse,
                _ => Verdict::NoDifferenceShown,
            };
            assert_eq!(estimate.verdict, Some(expected), "{low} {high}");
            seen[expected as usize] += 1;
        }
    }
    assert!(seen[Verdict::Better as usize] > 0 && seen[Verdict::NoDifferenceShown as usize] > 0, "{seen:?}");
    assert_eq!(Verdict::of((0.0, 0.5), 0.0), Verdict::NoDifferenceShown, "an interval that touches equality does not exclude it");
    assert_eq!(Verdict::of((0.5, 1.0), 1.0), Verdict::NoDifferenceShown);
    let same = difference_of(&[entry("one", 30, &rounds(|_| 0), 0.03), entry("same", 30, &rounds(|_| 0), 0.03)]);
    assert_eq!(same.tau.unwrap(), Estimate { value: 0.0, interval: Some((0.0, 0.0)), verdict: Some(Verdict::NoDifferenceShown) });
}

#[test]
fn other_prompts_and_too_few_get_no_verdict() {
    let one = entry("one", 30, &rounds(|_| 1), 0.03);
    let mut other = entry("other", 30, &rounds(|_| 0), 0.03);
    figures_of(&mut other, RANKED).prompts_hash = "others".to_string();
    let difference = difference_of(&[one.clone(), other.clone()]);
    assert_eq!((difference.tau, difference.speed_ratio, difference.prompts), (None, None, 0));
    assert_eq!(difference.notes, ["not compared: other prompts"]);
    let mut thinking = entry("other", 30, &rounds(|_| 0), 0.03);
    thinking.score.thinking = Some(true);
    let difference = difference_of(&[one.clone(), thinking]);
    assert_eq!((difference.tau, difference.prompts), (None, 0));
    assert_eq!(difference.notes, ["not compared: one is with thinking, the other without"]);

    figures_of(&mut other, RANKED).by_prompt.clear();
    assert!(difference_of(&[one.clone(), other.clone()]).notes[0].contains("older versions"));

    other.score.decoders.remove(RANKED);
    let difference = difference_of(&[other, one]);
    assert_eq!(difference.notes, ["not compared: other has no such figures"]);

    let difference = difference_of(&[entry("one", 30, &[20], 0.03), entry("other", 30, &[10], 0.03)]);
    let tau = difference.tau.unwrap();
    assert_eq!((tau.value, tau.interval, tau.verdict), (3.0, None, None));
    assert_eq!(difference.speed_ratio.unwrap().verdict, None);
    assert_eq!(difference.notes, ["one prompt is too few for an interval"]);
}

#[test]
fn speeds_of_other_machines_get_no_verdict() {
    let one = entry("one", 30, &rounds(|_| 1), 0.03);
    let verdicts = |change: fn(&mut Entry)| {
        let mut other = entry("other", 30, &rounds(|_| 0), 0.02);
        change(&mut other);
        let difference = difference_of(&[one.clone(), other]);
        (difference.tau.unwrap().verdict, difference.speed_ratio.unwrap().verdict, difference.notes.concat())
    };
    let better = Some(Verdict::Better);
    assert_eq!(verdicts(|_| {}), (better, better, String::new()));
    let faster_machine = |entry: &mut Entry| {
        entry.run = Some("elsewhere".to_string());
        figures_of(entry, ALONE).by_prompt.iter_mut().for_each(|it| it.seconds *= 0.8);
    };
    let (tau, speed, notes) = verdicts(faster_machine);
    assert_eq!((tau, speed), (better, None));
    assert!(notes.contains("the target alone ran 1.25× (1.25× to 1.25×) as fast"), "{notes}");
    // Timed anew on the same machine: a little faster here, a little slower there.
    let again = |entry: &mut Entry| {
        entry.run = Some("elsewhere".to_string());
        let prompts = figures_of(entry, ALONE).by_prompt.iter_mut().enumerate();
        prompts.for_each(|(index, it)| it.seconds *= 1.0 + 0.02 * ((index * 7 % 5) as f64 - 2.0));
    };
    assert_eq!(verdicts(again), (better, better, String::new()));
    let alone_unknown = |entry: &mut Entry| drop((entry.score.decoders.remove(ALONE), entry.run = None));
    assert!(verdicts(alone_unknown).2.contains("nothing shows that both were measured on the same machine"));
    let (tau, speed, notes) = verdicts(|entry| entry.score.dtype = "bf16".to_string());
    assert_eq!((tau, speed, notes.contains("other dtype (bf16, the reference's f32)")), (better, None, true), "{notes}");
    let (tau, speed, notes) = verdicts(|entry| entry.score.concurrency = 4);
    assert_eq!((tau, speed, notes.contains("4 texts at once, the reference 1")), (better, None, true), "{notes}");
    let (tau, speed, notes) = verdicts(|entry| entry.score.target = "large".to_string());
    assert_eq!((tau, speed, notes.contains("other target (large, the reference's small.gguf)")), (None, None, true), "{notes}");
    let (tau, speed, notes) = verdicts(|entry| entry.score.temperature = 1.0);
    assert_eq!((tau, speed, notes.contains("other temperature")), (None, None, true), "{notes}");
    let longer = |entry: &mut Entry| figures_of(entry, RANKED).by_prompt.iter_mut().for_each(|it| it.committed *= 2);
    assert!(verdicts(longer).2.contains("mind: its texts have 4800 tokens, the reference's 2400"));
}

#[test]
fn other_settings_of_the_drafters_are_said_and_judged() {
    let one = entry("one", 30, &rounds(|_| 1), 0.03);
    let said = |change: &dyn Fn(&mut Score)| {
        let mut other = entry("other", 30, &rounds(|_| 0), 0.02);
        change(&mut other.score);
        let difference = difference_of(&[one.clone(), other]);
        assert!(difference.speed_ratio.unwrap().verdict.is_some());
        difference.notes.concat()
    };
    let dtype = said(&|score| score.drafter_dtype = "f32".to_string());
    assert_eq!(dtype, "mind: other dtype of the drafter (f32, the reference's bf16)");
    let fan_out = said(&|score| score.fan_out = "rectangle, 11 × 2".to_string());
    assert_eq!(fan_out, "mind: other fan-out (rectangle, 11 × 2, the reference's best_first, 24 blocks)");

    // What a budget comes to is a matter of the checkpoint.
    let measured = Measured { texts: 1, context: 9, verify_seconds: 0.1, packs: Vec::new(), shared_device: false };
    let timed = |blocks: usize, asked: &str| {
        let mut entry = entry(&format!("{blocks} {asked}"), 30, &rounds(|_| 0), 0.02);
        entry.score.fan_out = format!("best_first, {blocks} blocks ({asked})");
        entry.score.budget = Some(Resolved { asked: asked.to_string(), blocks, measured: measured.clone() });
        entry
    };
    assert!(difference_of(&[timed(9, "auto"), timed(12, "auto")]).notes.is_empty());
    let notes = difference_of(&[timed(9, "auto"), timed(9, "20 ms")]).notes.concat();
    assert_eq!(notes, "mind: other fan-out (best_first, budget 20 ms, the reference's best_first, budget auto)");
}

#[test]
fn the_fastest_has_the_same_output_and_those_it_is_not_shown_to_beat_are_named() {
    let mut wrong = entry("wrong", 28, &rounds(|_| 0), 0.01);
    figures_of(&mut wrong, RANKED).identical_to_autoregressive = Some(false);
    let near = rounds(|prompt| 2 * (prompt % 2));
    let mut tied = entry("tied", 28, &near, 0.03);
    figures_of(&mut tied, RANKED).identical_to_autoregressive = Some(false);
    figures_of(&mut tied, RANKED).near_ties = Some(1);
    figures_of(&mut tied, RANKED).first_divergences =
        vec![Divergence { prompt: 0, position: 1, expected: None, found: None, margin: Some(0.0), noise: 0.0, near_tie: true }];
    let entries = [entry("slow", 30, &rounds(|_| 9), 0.03), wrong, entry("even", 29, &rounds(|_| 1), 0.0299), tied];
    let comparison = compare(&entries, None, &[]).unwrap();
    let identical: Vec<&str> =
        comparison.rows.iter().filter(|row| row.decoder == RANKED).map(|row| row.identical.unwrap()).collect();
    assert_eq!(identical, ["yes", "no", "yes", "near-ties"]);
    let fastest = &comparison.fastest[0];
    assert_eq!((fastest.label.as_str(), fastest.benchmark.as_str(), comparison.fastest.len()), ("even", "gsm8k", 1));
    assert_eq!(fastest.not_shown_slower, ["tied"]);
    assert_eq!(compare(&entries[..1], None, &[]).unwrap().fastest, []);
}

#[test]
fn names_choose_the_reference_and_the_benchmarks() {
    let mut entries =
        [entry("a/step-1", 30, &[9, 9], 0.03), entry("b/step-1", 30, &[9, 9], 0.03), entry("b/layers-29", 29, &[9, 9], 0.03)];
    for entry in &mut entries {
        entry.score.checkpoint = entry.label[2..].to_string();
    }
    let against = |label| compare(&entries, Some(label), &[]).map(|comparison| comparison.against);
    assert_eq!(compare(&entries, None, &[]).unwrap().against, "a/step-1");
    assert_eq!(against("b/step-1").unwrap(), "b/step-1");
    assert_eq!(against("layers-29").unwrap(), "b/layers-29");
    let message = against("step-1").unwrap_err().to_string();
    assert_eq!(message, "no score is called `step-1`; there are: a/step-1, b/step-1, b/layers-29");
    let message = compare(&entries, None, &["math".to_string()]).unwrap_err().to_string();
    assert_eq!(message, "no score has the benchmark `math`; there are: gsm8k");
    assert_eq!(compare(&entries, None, &["gsm8k".to_string()]).unwrap().rows.len(), 9);
    assert!(matches!(compare(&[], None, &[]), Err(ComparisonError::Nothing)));
    entries[0].score.decoders.clear();
    let message = compare(&entries, None, &[]).unwrap_err().to_string();
    assert!(message.contains("has no figures"), "{message}");
    assert!(matches!(compare(&entries[..1], None, &[]), Err(ComparisonError::Nothing)));
}

fn sample() -> Comparison {
    let mut odd = entry("layers, \"28\"", 28, &rounds(|prompt| prompt % 3), 0.027);
    figures_of(&mut odd, "lockstep").prompts_hash = "others".to_string();
    let entries = [entry("step-000048", 30, &rounds(|_| 1), 0.03), entry("layers-29", 29, &rounds(|_| 0), 0.0285), odd];
    compare(&entries, None, &[]).unwrap().beside(&configs::Reference::named("d3d").unwrap())
}

#[test]
fn the_table_is_aligned_and_explained() {
    let text = table(&sample());
    let expected = "\
gsm8k: 40 prompts, the target alone 50.0 tokens/s

checkpoint    decoder       layers  parameters                    τ  tokens/s               speedup  hit rate     pack  identical
─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
step-000048   asynchronous      30     134.5 M  2.35 (2.25 to 2.45)      78.4  1.57× (1.49 to 1.65)      50 %  12.3 ms  yes
step-000048   lockstep          30     134.5 M  2.35 (2.25 to 2.45)      52.3  1.05× (0.99 to 1.10)      50 %        –  yes
";
    assert!(text.starts_with(expected), "{text}");
    let expected = "
against step-000048, prompt by prompt

checkpoint    decoder       prompts                      Δτ  in τ                                speed  in speed
────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
layers-29     asynchronous       40  +0.10 (+0.08 to +0.11)  better               1.10× (1.09 to 1.10)  better
";
    assert!(text.contains(expected), "{text}");
    let unclear = text.lines().find(|line| line.contains("(−0.02 to +0.03)")).unwrap_or_else(|| panic!("{text}"));
    assert!(unclear.contains("no difference shown") && unclear.ends_with("better"), "{unclear}");
    let expected = "
layers, \"28\" (lockstep): not compared: other prompts

fastest with the same output on gsm8k: layers, \"28\", 87.2 tokens/s, 1.74× the target alone; all others are shown to be slower

published: other hardware (1 or 2 GPUs), target Qwen3-8B; greedy, one text at a time. The target measured here is another model: small

method   target    GPUs  benchmark     τ  speedup  from
";
    assert!(text.contains(&expected[1..]), "{text}");
    assert!(text.contains("DSpark") && !text.contains("Qwen3-32B") && text.ends_with(text::LEGEND), "{text}");
}

#[test]
fn published_figures_stand_under_our_names_and_their_targets() {
    let mut ours = entry("ours", 36, &[9, 9], 0.03);
    ours.score.target = "qwen3-32b".to_string();
    let reference = configs::Reference::named("d3d").unwrap();
    let published = compare(&[ours.clone()], None, &[]).unwrap().beside(&reference).published.unwrap();
    assert!(published.rows.iter().all(|row| row.target == "Qwen3-32B" && row.benchmark == "mean") && published.rows.len() == 6);
    assert!(!published.caution.contains("another model"), "{}", published.caution);

    ours.score.target = "Qwen3-8B".to_string();
    for decoder in ours.score.decoders.values_mut() {
        decoder.benchmarks = BTreeMap::from([("livecodebench".to_string(), decoder.benchmarks.remove("gsm8k").unwrap())]);
    }
    let published = compare(&[ours], None, &[]).unwrap().beside(&reference).published.unwrap();
    let first = &published.rows[0];
    assert_eq!((first.benchmark.as_str(), first.beside.as_deref()), ("livecodebench-v6", Some("livecodebench")));
    assert_eq!((first.method.as_str(), first.gpus, first.tau, first.speedup), ("D3D", Some(2), 6.68, 4.44));
    assert_eq!(published.rows.len(), 7);
}

#[test]
fn sampled_drafts_agree_in_distribution_and_may_be_the_fastest() {
    let mut entries = [entry("one", 30, &rounds(|_| 1), 0.03), entry("other", 29, &rounds(|_| 0), 0.0285)];
    for entry in &mut entries {
        (entry.score.drafts, entry.score.temperature) = ("sampled".to_string(), 0.7);
        for decoder in [RANKED, "lockstep"] {
            figures_of(entry, decoder).identical_to_autoregressive = None;
        }
    }
    let comparison = compare(&entries, None, &[]).unwrap();
    let said: Vec<_> = comparison.rows.iter().filter(|row| row.decoder != ALONE).map(|row| row.identical).collect();
    assert_eq!(said, [Some("in distribution"); 4]);
    assert_eq!(comparison.fastest[0].label, "other");
}

#[test]
fn json_has_every_key_and_null_for_what_is_not_known() {
    let json: Value = serde_json::to_value(sample()).unwrap();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(keys(&json), "schema against rows fastest published");
    let row = "label run checkpoint kind target dtype drafter_dtype block_size layers parameters fan_out concurrency temperature \
               benchmark decoder prompts tokens rounds tau tau_interval tokens_per_second speedup speedup_interval hit_rate \
               pack_milliseconds identical difference";
    for one in json["rows"].as_array().unwrap() {
        assert_eq!(keys(one), row);
    }
    assert_eq!(json["schema"], json!(1));
    let of = |index: usize| &json["rows"][index];
    assert_eq!((&of(0)["decoder"], &of(0)["difference"], &of(2)["speedup"]), (&json!(RANKED), &Value::Null, &Value::Null));
    let difference = &of(3)["difference"];
    assert_eq!(keys(difference), "prompts tau speed_ratio notes");
    assert_eq!(keys(&difference["tau"]), "value interval verdict");
    assert_eq!((&difference["tau"]["verdict"], difference["tau"]["interval"].as_array().unwrap().len()), (&json!("better"), 2));
    assert_eq!(keys(&json["fastest"][0]), "benchmark decoder label tokens_per_second speedup not_shown_slower");
    assert_eq!(keys(&json["published"]["rows"][0]), "method paper target gpus benchmark beside tau speedup");
}

/// The records of a CSV text, unquoted.
fn records(text: &str) -> Vec<Vec<String>> {
    let (mut records, mut record, mut field, mut quoted) = (Vec::new(), Vec::new(), String::new(), false);
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '"' if quoted && characters.peek() == Some(&'"') => field.extend(characters.next()),
            '"' => quoted = !quoted,
            ',' if !quoted => record.push(std::mem::take(&mut field)),
            '\r' if !quoted => {
                assert_eq!(characters.next(), Some('\n'));
                record.push(std::mem::take(&mut field));
                records.push(std::mem::take(&mut record));
            }
            _ => field.push(character),
        }
    }
    assert!(field.is_empty() && record.is_empty(), "the last line is not ended");
    records
}

#[test]
fn csv_quotes_what_needs_it_and_has_one_line_a_row() {
    assert_eq!(csv::line(["a", "b,c", "d\"e", "f\ng", ""].into_iter()), "a,\"b,c\",\"d\"\"e\",\"f\ng\",\r\n");
    let comparison = sample();
    let records = records(&csv(&comparison));
    assert_eq!(records.len(), 1 + 9 + 7);
    assert!(records.iter().all(|record| record.len() == records[0].len()));
    let value = |record: usize, name: &str| {
        let column = records[0].iter().position(|known| known == name).unwrap_or_else(|| panic!("{name}"));
        records[record][column].as_str()
    };
    assert_eq!((value(7, "label"), value(7, "decoder"), value(7, "layers")), ("layers, \"28\"", RANKED, "28"));
    let row = &comparison.rows[3];
    let tau = row.difference.as_ref().unwrap().tau.unwrap();
    assert_eq!(value(4, "tau").parse(), Ok(row.tau));
    assert_eq!(value(4, "tau_difference_low").parse(), Ok(tau.interval.unwrap().0));
    assert_eq!((value(4, "tau_verdict"), value(4, "against"), value(4, "paired_prompts")), ("better", "step-000048", "40"));
    assert_eq!((value(1, "against"), value(1, "tau_difference"), value(8, "notes")), ("", "", "not compared: other prompts"));
    assert_eq!((value(10, "label"), value(10, "benchmark"), value(10, "published_gpus")), ("published D3D", "gsm8k", "2"));
    assert!(value(10, "notes").starts_with("published: other hardware"));
}

#[test]
fn the_page_is_whole_and_draws_dots_and_depth() {
    let comparison = sample();
    let page = html(&comparison);
    check_well_formed(&page);
    assert!(!page.contains("<script") && !page.contains("src=") && !page.contains("href="));
    // Speedup, τ, and both over depth, each for wide and for narrow screens.
    assert_eq!(page.matches("<svg").count(), 8);
    assert_eq!(page.matches("role=\"img\" aria-label=").count(), 8);
    assert!(page.contains("layers, &quot;28&quot;") && !page.contains("layers, \"28\""));
    // The published figure is far off: it stands at the edge and leaves the axis to ours.
    assert!(page.contains(">9.87 →</text>") && page.contains(">2.35</text>") && !page.contains(">10</text>"));
    assert!(page.contains("published: D3D, target Qwen3-8B") && page.contains("<td class=\"yes\">better</td>"));
    let flat = compare(&[entry("one", 30, &[9, 9], 0.03), entry("other", 30, &[9, 8], 0.03)], None, &[]).unwrap();
    assert_eq!(html(&flat).matches("<svg").count(), 4, "one depth is no curve");
}

#[test]
fn broken_figures_are_not_drawn() {
    let mut broken = entry("broken", 29, &rounds(|_| 0), 0.03);
    let figures = figures_of(&mut broken, RANKED);
    (figures.tau_pooled, figures.speedup) = (f64::NAN, Some(f64::INFINITY));
    (figures.tau_interval, figures.speedup_interval) = (Some((f64::NEG_INFINITY, 1e300)), None);
    figures.by_prompt.iter_mut().for_each(|it| (it.committed, it.seconds) = (usize::MAX, f64::NAN));
    let comparison = compare(&[entry("one", 30, &rounds(|_| 1), 0.03), broken], None, &[]).unwrap();
    let page = html(&comparison);
    check_well_formed(&page);
    for svg in page.split("<svg").skip(1).map(|rest| rest.split("</svg>").next().unwrap()) {
        let coordinates = svg.split('"').skip(1).step_by(2).filter(|value| !value.contains(' ') || value.starts_with('M'));
        assert!(coordinates.clone().all(|value| !value.contains("NaN") && !value.contains("inf")), "{svg}");
    }
    assert!(table(&comparison).contains("broken") && csv(&comparison).contains("broken"));
}
