//! Hardware profiles: the ones that ship, one's own, and what is said about faulty ones.

use super::*;

const PROFILE: &str = r#"name = "lab"
source = "measured in the lab"

[verify]
floor_ms = 5
per_token_ms = 0.5
per_context_token_ms = 0.001
overhead_ms = 0.25

[pack]
floor_ms = 2
per_token_ms = 0
per_context_token_ms = 0
overhead_ms = 0

[draft]
floor_ms = 1.5
per_token_ms = 0
per_context_token_ms = 0
overhead_ms = 0
"#;

const PRESETS: [&str; 4] = ["h100-graphs-8b-8b", "h100-graphs-8b-1.7b", "h100-graphs-32b-1.7b", "h100-transformers-8b-8b"];

impl Folder {
    fn hardware(&self, named: &[&str]) -> Vec<Hardware> {
        let recipe = self.load(&format!("{MINIMAL}[evaluate]\nhardware = {named:?}\n"), &[]);
        recipe.unwrap_or_else(|error| panic!("{error}")).evaluate.hardware
    }

    /// What is said about a recipe that names a profile with this text.
    fn message_about(&self, profile: &str) -> String {
        self.write("lab.toml", profile);
        self.message(&format!("{MINIMAL}[evaluate]\nhardware = [\"lab.toml\"]\n"), &[])
    }
}

#[test]
fn every_preset_loads_by_its_name_and_says_that_it_is_estimated() {
    let presets = Folder::new().hardware(&PRESETS);
    for (preset, name) in presets.iter().zip(PRESETS) {
        assert_eq!((preset.name.as_str(), preset.reference.as_str()), (name, name));
        assert!(preset.source.starts_with("estimated, not measured: "), "{}", preset.source);
    }
    let shipped = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("hardware")).unwrap().count();
    assert_eq!(shipped, PRESETS.len(), "every file is a preset");
    // A pack of 24 blocks of 16 outlasts the verification of one where both models are of a size and graphs are captured; in plain
    // Transformers and beside a larger target it does not.
    let outlasts = |preset: &Hardware| preset.pack.seconds(384, 1000) > preset.verify.seconds(16, 1000);
    assert_eq!(presets.iter().map(outlasts).collect::<Vec<_>>(), [true, false, false, false]);
}

#[test]
fn a_forward_takes_the_longer_of_floor_and_arithmetic_and_what_comes_on_top() {
    let folder = Folder::new();
    let path = folder.write("lab.toml", PROFILE);
    let lab = &folder.hardware(&["lab.toml"])[0];
    assert_eq!(
        (lab.name.as_str(), lab.source.as_str(), Path::new(&lab.reference)),
        ("lab", "measured in the lab", path.as_path())
    );
    for (tokens, context, milliseconds) in [(1, 0, 5.25), (10, 0, 5.25), (11, 0, 5.75), (20, 0, 10.25), (11, 1000, 6.75)] {
        let seconds = lab.verify.seconds(tokens, context);
        assert!((seconds - milliseconds / 1000.0).abs() < 1e-15, "{tokens} {context}: {seconds}");
    }
    assert_eq!((lab.pack.seconds(384, 9), lab.draft.seconds(16, 9)), (0.002, 0.0015));
}

#[test]
fn a_recipe_with_profiles_loads_back_from_anywhere() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    folder.write("lab.toml", PROFILE);
    let recipe = folder.load(&format!("{MINIMAL}[evaluate]\nhardware = [\"./lab.toml\", \"h100-graphs-8b-8b\"]\n"), &[]).unwrap();
    let loaded = elsewhere.load(&recipe.to_toml(), &[]).unwrap();
    assert_eq!(Recipe { file: recipe.file.clone(), ..loaded }, recipe);
}

#[test]
fn every_key_of_a_profile_is_asked_for() {
    let folder = Folder::new();
    for (number, line) in PROFILE.lines().enumerate().filter(|(_, line)| line.contains('=')) {
        let key = line.split(' ').next().unwrap();
        let lines: Vec<&str> = PROFILE.lines().enumerate().filter(|(other, _)| *other != number).map(|(_, line)| line).collect();
        let message = folder.message_about(&lines.join("\n"));
        assert!(message.starts_with("lab.toml") && message.contains(&format!("{key}`; add `{key} = …`")), "{message}");
    }
    let named: BTreeSet<String> = PROFILE.lines().filter_map(|line| Some(line.split_once(" = ")?.0.to_string())).collect();
    assert_eq!(named, typed::Hardware::key_paths().into_iter().collect(), "the profile above names every key");
    assert_eq!(
        folder.message_about(&PROFILE.replacen("floor_ms = 2\n", "", 1)),
        "lab.toml:10:1: missing key `pack.floor_ms`; add `floor_ms = …` under `[pack]`, a finite number\n10 | [pack]\n   | ^^^^^^"
    );
    let without = PROFILE.split("[draft]").next().unwrap();
    assert_eq!(
        folder.message_about(without),
        "lab.toml: missing key `draft.floor_ms`; add `floor_ms = …` under `[draft]`, a finite number"
    );
}

#[test]
fn faulty_profiles_are_pointed_at() {
    let folder = Folder::new();
    for (from, to, says) in [
        ("floor_ms = 5", "flor_ms = 5", "lab.toml:5:1: unknown key `verify.flor_ms`; nearest valid key: `floor_ms`"),
        ("[pack]", "[packs]", "lab.toml:10:2: unknown key `packs`; nearest valid key: `pack`"),
        ("floor_ms = 5", "floor_ms = \"5\"", "lab.toml:5:12: `verify.floor_ms` must be a finite number, not the string `\"5\"`"),
        ("floor_ms = 5", "floor_ms = inf", "lab.toml:5:12: `verify.floor_ms` must be a finite number, not the float `inf`"),
        ("floor_ms = 2", "floor_ms = -2", "lab.toml:11:12: `pack.floor_ms` must be from 0 to 3600000 milliseconds, not `-2`"),
        ("floor_ms = 2", "floor_ms = 0", "lab.toml:11:12: `pack.floor_ms` must be greater than 0, for no forward is free"),
        (
            "overhead_ms = 0.25",
            "overhead_ms = -0.5",
            "lab.toml:8:15: `verify.overhead_ms` must be from 0 to 3600000 milliseconds, not `-0.5`",
        ),
        ("\"lab\"", "\"a lab\"", "lab.toml:1:8: `name` must be letters, digits, `-`, `_` and `.`, the first not a `.`"),
        ("\"measured in the lab\"", "\" \"", "lab.toml:2:10: `source` must say on one line where the figures come from"),
        ("floor_ms = 5", "floor_ms = = 5", "lab.toml:5:12: not valid TOML: "),
    ] {
        let message = folder.message_about(&PROFILE.replacen(from, to, 1));
        assert!(message.lines().next().unwrap().starts_with(says), "{message}");
    }
}

#[test]
fn what_a_recipe_names_is_a_preset_or_a_file_and_no_two_of_a_name() {
    let folder = Folder::new();
    folder.write("lab.toml", PROFILE);
    folder.write("more/lab.toml", PROFILE);
    let names = "`h100-graphs-8b-8b`, `h100-graphs-8b-1.7b`, `h100-graphs-32b-1.7b`, `h100-transformers-8b-8b`";
    for (named, column, says) in [
        ("h100", 13, format!("must be one of {names}, or the path of a profile that ends in `.toml`, not `h100`")),
        (
            "lab.toml\", \"more/lab.toml",
            25,
            "names two profiles `lab`, which scores could not tell apart; rename one".to_string(),
        ),
    ] {
        let message = folder.message(&format!("{MINIMAL}[evaluate]\nhardware = [\"{named}\"]\n"), &[]);
        assert_eq!(message.lines().next().unwrap(), format!("recipe.toml:18:{column}: `evaluate.hardware` {says}"));
    }
    let message = folder.message(MINIMAL, &["evaluate.hardware=[\"absent.toml\"]"]);
    assert!(message.contains("`evaluate.hardware`: no file `") && message.contains("absent.toml`"), "{message}");
}

#[test]
fn the_clock_is_for_texts_decoded_one_at_a_time() {
    let folder = Folder::new();
    let text = format!("{MINIMAL}[evaluate]\nhardware = [\"h100-graphs-8b-8b\"]\nconcurrency = 4\n");
    assert!(
        folder.message(&text, &[]).starts_with(
            "recipe.toml:18:12: `evaluate.hardware` times texts that are decoded one at a time, but `evaluate.concurrency` is 4; keep one"
        ),
        "{}",
        folder.message(&text, &[])
    );
    assert!(folder.load(&text, &["evaluate.hardware=[]"]).is_ok());
}
