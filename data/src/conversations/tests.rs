#![allow(clippy::unwrap_used)]

use super::*;
use crate::prompts::Request;
use crate::requests::write_chunk;
use crate::responses::{SCHEMA_VERSION, part_name};
use crate::supervision::{below, counter_generator};
use crate::testing::{END, byte_tokenizer, template};

/// Forty conversations in three chunks: every third has three turns, every seventh was tokenised before.
fn write_work(folder: &Path) {
    let (tokenizer, template) = (byte_tokenizer(), template());
    let work = |index: usize| {
        let messages = vec![Message::new("user", format!("question {index}"))];
        let prompt_text = template.render(&messages, true, None).unwrap();
        let later = match index % 3 {
            0 => vec![vec![Message::new("user", "and?")], vec![Message::new("user", "so?")]],
            _ => Vec::new(),
        };
        let request =
            Request { id: format!("row-{index}"), messages, tools: None, source: "s".into(), file: "f".into(), line: index };
        let given = index % 7 == 6;
        Work {
            request,
            later: if given { Vec::new() } else { later },
            prompt_ids: if given { vec![1, 2, 3, 4, END] } else { tokenizer.encode(&prompt_text, false).unwrap() },
            prompt_text,
            supervised: if given { vec![1..2, 3..5] } else { Vec::new() },
        }
    };
    for (chunk, rows) in [(0, 0..16), (1, 16..32), (2, 32..40)] {
        write_chunk(folder, chunk, &rows.map(work).collect::<Vec<_>>()).unwrap();
    }
}

fn provenance() -> Provenance {
    Provenance {
        target: "t".into(),
        revision: "main".into(),
        tokenizer_hash: "a".into(),
        chat_template_hash: "b".into(),
        sampling: "greedy".into(),
        schema_version: SCHEMA_VERSION,
    }
}

/// An engine whose answers hang on the question alone: some end by length, some conversations are refused at their last turn.
fn reply(question: &Question, with_ids: bool) -> Result<Answer, String> {
    let sum: u32 = question.prompt_ids.iter().sum();
    if question.messages[0].content.ends_with("12") && question.messages.len() > 3 {
        return Err("no".to_owned());
    }
    let text = format!("answer {sum} {}", question.counter % 10);
    let cut = sum.is_multiple_of(11);
    let finish_reason = if cut { FinishReason::Length } else { FinishReason::Stop };
    let mut ids: Vec<u32> = text.bytes().map(u32::from).collect();
    if !cut {
        ids.push(END);
    }
    Ok(Answer { ids: with_ids.then_some(ids), text: (!with_ids).then_some(text), finish_reason })
}

/// The same engine in a good mood: it refuses nothing.
fn willing(question: &Question, with_ids: bool) -> Result<Answer, String> {
    reply(question, with_ids).or_else(|_| Ok(Answer { ids: Some(vec![7, END]), text: None, finish_reason: FinishReason::Stop }))
}

/// Answers up to `most` questions, eight under way, in an order drawn by `seed`; whether all is through.
fn drive(folder: &Path, work: &Path, seed: u64, most: usize, finish: bool, with_ids: bool) -> bool {
    let (tokenizer, template, provenance) = (byte_tokenizer(), template(), provenance());
    let common = Common {
        folder,
        work,
        provenance: &provenance,
        tokenizer: &tokenizer,
        template: &template,
        thinking: false,
        temperature: 0.0,
        max_tokens: 200,
        stop_tokens: &[END],
        may_be_refused: 5,
    };
    let mut told = Done::default();
    let mut progress = |done| told = done;
    let mut asking = Asking::new(common, &[0, 1, 2], &mut progress).unwrap();
    let mut draw = counter_generator(seed, 99, 0, 0);
    let mut under_way: Vec<Question> = Vec::new();
    for _ in 0..most {
        while under_way.len() < 8
            && let Some(question) = asking.next()
        {
            under_way.push(question);
        }
        if under_way.is_empty() {
            break;
        }
        let question = under_way.swap_remove(below(&mut draw, under_way.len() as u64) as usize);
        let answer = reply(&question, with_ids);
        assert!(asking.answer(question.key, answer).is_continue());
        // As if so many had been answered that they are journaled.
        if below(&mut draw, 5) == 0 {
            asking.save().unwrap();
        }
    }
    // A killed process does not finish.
    let through = finish && asking.finish().unwrap();
    if through {
        assert_eq!((told.conversations, told.refused), (40, 1));
    }
    through
}

fn rows(folder: &Path) -> Vec<Response> {
    (0..3).flat_map(|chunk| read_part(&folder.join(part_name(chunk))).unwrap().1).collect()
}

#[test]
fn a_hundred_kills_leave_the_same_rows_as_none() {
    let work = tempfile::tempdir().unwrap();
    write_work(work.path());
    let whole = tempfile::tempdir().unwrap();
    assert!(drive(whole.path(), work.path(), 0, usize::MAX, true, true));
    let expected = rows(whole.path());
    let refused_row = refused(whole.path(), 0).unwrap();
    assert_eq!((refused_row.len(), refused_row[0].reason.as_str()), (1, "no"));
    assert!(expected.iter().all(|row| row.id != "row-12"), "nothing of a refused conversation is kept");
    let turns = |id: &str| expected.iter().filter(|row| row.id == id).map(|row| row.turn).collect::<Vec<_>>();
    assert!(expected.iter().any(|row| row.turn == 2) && turns("row-1") == [0] && turns("row-6") == [0, 1]);
    let mut kills = 0;
    for seed in 1.. {
        if kills >= 100 {
            break;
        }
        let folder = tempfile::tempdir().unwrap();
        let mut attempt = 0;
        while !drive(folder.path(), work.path(), 1000 * seed + attempt, 3 + attempt as usize % 13, true, true) {
            attempt += 1;
            kills += 1;
            let _ = drive(folder.path(), work.path(), 1000 * seed + 500 + attempt, 1 + attempt as usize % 7, false, true);
            assert!(attempt < 300, "it never ends");
        }
        assert_eq!(rows(folder.path()), expected);
        let left: Vec<_> = fs::read_dir(folder.path().join(UNDER_WAY)).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(left, ["rejected-00000.jsonl"], "no journal is left");
    }
}

#[test]
fn text_alone_becomes_the_same_ids_and_says_so() {
    let work = tempfile::tempdir().unwrap();
    write_work(work.path());
    let (with_ids, with_text) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    assert!(drive(with_ids.path(), work.path(), 0, usize::MAX, true, true));
    assert!(drive(with_text.path(), work.path(), 0, usize::MAX, true, false));
    let (ids, texts) = (rows(with_ids.path()), rows(with_text.path()));
    assert_eq!(ids.len(), texts.len());
    for (one, other) in ids.iter().zip(&texts) {
        assert_eq!(
            (&one.response_ids, &one.response_text, one.finish_reason),
            (&other.response_ids, &other.response_text, other.finish_reason)
        );
        let expected = if one.ids_from == IdsFrom::Given { IdsFrom::Given } else { IdsFrom::Tokenizer };
        assert_eq!(other.ids_from, expected);
        // A later prompt goes on from what was answered, and no stop token is made up.
        assert_eq!(
            one.finish_reason == FinishReason::Stop,
            one.response_ids.last() == Some(&END) || one.ids_from == IdsFrom::Given
        );
    }
    let second = ids.iter().find(|row| row.id == "row-3" && row.turn == 1).unwrap();
    let first = ids.iter().find(|row| row.id == "row-3" && row.turn == 0).unwrap();
    assert_eq!(second.prompt_text, format!("{}{}<|end|>user:and?<|end|>assistant:", first.prompt_text, first.response_text));
}

/// All conversations with an engine, one question after the other; also how many were asked.
fn have_all(
    folder: &Path,
    work: &Path,
    change: impl Fn(&mut Common<'_>),
    engine: fn(&Question, bool) -> Result<Answer, String>,
) -> (Result<bool, ConversationError>, usize) {
    let (tokenizer, template, provenance) = (byte_tokenizer(), template(), provenance());
    let mut common = Common {
        folder,
        work,
        provenance: &provenance,
        tokenizer: &tokenizer,
        template: &template,
        thinking: false,
        temperature: 0.0,
        max_tokens: 200,
        stop_tokens: &[END],
        may_be_refused: 0,
    };
    change(&mut common);
    let mut progress = |_| {};
    let mut asking = Asking::new(common, &[0, 1, 2], &mut progress).unwrap();
    let mut asked = 0;
    while let Some(question) = asking.next() {
        asked += 1;
        if asking.answer(question.key, engine(&question, false)).is_break() {
            break;
        }
    }
    (asking.finish(), asked)
}

#[test]
fn too_many_refusals_end_the_stage_and_are_asked_again_and_nothing_else_is() {
    let (work, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_work(work.path());
    // One is within what may be refused, so its chunk is through.
    assert!(have_all(folder.path(), work.path(), |common| common.may_be_refused = 1, reply).0.unwrap());
    assert_eq!(refused(folder.path(), 0).unwrap().len(), 1);
    let expected = rows(folder.path());
    limit_refused(folder.path(), 0..3, 1).unwrap();
    // What is within the limit of each rank may be beyond that of all.
    let message = limit_refused(folder.path(), 0..3, 0).unwrap_err().to_string();
    assert!(message.contains("refused 1 conversations") && message.contains("no"), "{message}");
    assert!(!is_through(folder.path(), 0) && is_through(folder.path(), 1), "the chunk with a refused row is under way again");
    assert!(have_all(folder.path(), work.path(), |common| common.may_be_refused = 1, reply).0.unwrap());
    assert_eq!(rows(folder.path()), expected);
    fs::remove_file(folder.path().join(part_name(2))).unwrap();
    // Now none may be: the next answer that is no answer ends it.
    let (ended, _) = have_all(folder.path(), work.path(), |_| {}, |_, _| Err("gone".to_owned()));
    let message = ended.unwrap_err().to_string();
    assert!(message.contains("refused 2 conversations") && message.contains("gone"), "{message}");
    assert!(!is_through(folder.path(), 0) && is_through(folder.path(), 1), "the chunk with a refused row is under way again");
    let (ended, asked) = have_all(folder.path(), work.path(), |_| {}, willing);
    assert!(ended.unwrap());
    let last: usize = expected.iter().filter(|row| row.ids_from != IdsFrom::Given && row.source == "s").count();
    assert!(asked < last, "only the refused row of the first chunk and the lost third chunk: {asked}");
    let found = rows(folder.path());
    let others: Vec<&Response> = found.iter().filter(|row| row.id != "row-12").collect();
    assert_eq!(others, expected.iter().collect::<Vec<_>>());
    assert_eq!(found.iter().filter(|row| row.id == "row-12").count(), 3);
}

#[test]
fn a_turn_without_room_ends_a_conversation_and_an_unknown_end_is_a_fault() {
    let (work, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_work(work.path());
    assert!(have_all(folder.path(), work.path(), |common| common.max_tokens = 60, willing).0.unwrap());
    let short = rows(folder.path());
    assert!(short.iter().all(|row| row.prompt_ids.len() + 2 <= 60));
    assert_eq!(short.iter().filter(|row| row.id == "row-3").map(|row| row.turn).collect::<Vec<_>>(), [0]);
    // Text alone, and no way to tell which token ended it.
    let other = tempfile::tempdir().unwrap();
    let message = have_all(other.path(), work.path(), |common| common.stop_tokens = &[3], reply).0.unwrap_err().to_string();
    assert!(message.contains("no stop token of the target ([3])"), "{message}");
}
