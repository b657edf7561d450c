#![allow(clippy::unwrap_used)]
use super::*;

fn render(source: &str, messages: &[(&str, &str)]) -> Result<String, ChatError> {
    let special = SpecialTokens { bos: Some("<s>".into()), eos: Some("</s>".into()), ..SpecialTokens::default() };
    let message = |(role, content): &(&str, &str)| Message::new(*role, *content);
    let messages: Vec<Message> = messages.iter().map(message).collect();
    ChatTemplate::new(source.to_owned(), &special)?.render(&messages, true, None)
}

fn text(source: &str) -> String {
    render(source, &[("user", "Hi <b>"), ("assistant", "Yo")]).unwrap()
}

#[test]
fn the_context_is_that_of_transformers() {
    let source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}|{{ tools is defined }}|{{ tools is none }}|\
        {{ documents is none }}|{{ enable_thinking is defined }}|{{ add_generation_prompt }}|{{ none }}|{{ messages[0] | length }}|{{ 1 }}";
    assert_eq!(text(source), "<s>|</s>|False|True|True|True|False|True|None|2|1");
    let template = ChatTemplate::new("{{ enable_thinking }}".to_owned(), &SpecialTokens::default()).unwrap();
    assert_eq!(template.render(&[], false, Some(true)).unwrap(), "True");
    assert_eq!(template.render(&[], false, Some(false)).unwrap(), "False");
}

#[test]
fn nothing_is_escaped_and_python_methods_work() {
    assert_eq!(text("{{ messages[0].content }}"), "Hi <b>");
    assert_eq!(text("{{ messages[0].content.split('<')[-1].rstrip('>').upper() }}"), "B");
    assert_eq!(
        text("{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}"),
        "role=user;content=Hi <b>;"
    );
    assert_eq!(text("{{ messages[::-1] | map(attribute='role') | join(',') }}"), "assistant,user");
    assert_eq!(text("{{ messages[0] | tojson }}"), r#"{"role": "user", "content": "Hi <b>"}"#);
    assert_eq!(text("{{ messages[0] | tojson(indent=1) }}"), "{\n \"role\": \"user\",\n \"content\": \"Hi <b>\"\n}");
}

#[test]
fn blocks_leave_no_lines_and_loops_can_be_left() {
    let source = "{% for message in messages %}\n    {% if loop.last %}\n{% break %}\n    {% endif %}\n{{ message.role }}\n{% endfor %}\nend\n";
    assert_eq!(text(source), "user\nend");
}

#[test]
fn generation_tags_render_their_inside() {
    let source =
        "a \n  {% generation %}\n b {%- endgeneration %} c {%- generation -%} d {%+ endgeneration +%}\n{{ 'generation' }}";
    assert_eq!(text(source), "a \n b cd \ngeneration");
    assert_eq!(text("{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}"), "1");
    assert_eq!(replace_generation_tags("{% if generation %}{% x"), "{% if generation %}{% x");
}

#[test]
fn what_a_template_refuses_is_told_in_its_words() {
    let error = render("{{ raise_exception('roles must alternate') }}", &[]).unwrap_err();
    assert!(matches!(&error, ChatError::Refused(reason) if reason == "roles must alternate"), "{error}");
}

#[test]
fn faults_of_a_template_name_the_line() {
    let error = render("a\n{% if %}", &[]).unwrap_err();
    assert!(matches!(error, ChatError::Syntax(_)) && error.to_string().contains("chat_template:2"), "{error}");
    let error = render("a\n{{ messages[0].content.absent.deeper }}", &[("user", "u")]).unwrap_err();
    assert!(matches!(error, ChatError::Render(_)) && error.to_string().contains("chat_template:2"), "{error}");
    let error = render("{{ absent | tojson }}", &[]).unwrap_err();
    assert!(matches!(error, ChatError::Render(_)), "{error}");
}

#[test]
fn an_endless_template_is_stopped() {
    let source =
        "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}x{% endfor %}{% endfor %}{% endfor %}";
    assert!(matches!(render(source, &[]), Err(ChatError::Endless)));
}

#[test]
fn the_date_is_todays_unless_it_is_set() {
    let template = || ChatTemplate::new("{{ strftime_now('%d %b %Y') }}".to_owned(), &SpecialTokens::default()).unwrap();
    let today = chrono::Local::now().date_naive();
    let (date, text) = (template().date(), template().render(&[], false, None).unwrap());
    // The day may end between the lines.
    let now = chrono::Local::now().date_naive();
    assert!([today, now].map(|day| day.to_string()).contains(&date), "{date}");
    assert!([today, now].map(|day| day.format("%d %b %Y").to_string()).contains(&text), "{text}");

    let fixed = template().with_date("2024-07-26").unwrap();
    assert_eq!((fixed.date().as_str(), fixed.render(&[], false, None).unwrap().as_str()), ("2024-07-26", "26 Jul 2024"));
    let error = template().with_date("26 Jul 2024").unwrap_err().to_string();
    assert!(error.contains("`26 Jul 2024`") && error.contains("2026-01-31"), "{error}");
    assert!(matches!(render("{{ strftime_now('%Q') }}", &[]), Err(ChatError::Render(_))));
}

#[test]
fn a_folder_has_its_template_in_a_file_or_in_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    assert!(ChatTemplate::from_folder(folder.path()).unwrap_err().to_string().contains("tokenizer_config.json"));
    write("tokenizer_config.json", r#"{"eos_token": "</s>"}"#);
    assert!(matches!(ChatTemplate::from_folder(folder.path()), Err(ChatError::Absent(_))));
    let named = r#"[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]"#;
    write("tokenizer_config.json", &format!(r#"{{"eos_token": "</s>", "chat_template": {named}}}"#));
    assert_eq!(ChatTemplate::from_folder(folder.path()).unwrap().source(), "d");
    write("chat_template.jinja", "{{ eos_token }}");
    let template = ChatTemplate::from_folder(folder.path()).unwrap();
    assert_eq!(template.render(&[], false, None).unwrap(), "</s>");
    assert_eq!(template.hash(), sha256_hex("{{ eos_token }}"));
}

#[test]
fn tools_and_calls_reach_the_template() {
    let source = "{% for tool in tools %}{{ tool | tojson }};{% endfor %}{% for message in messages %}{% if message.tool_calls %}\
                  {% for call in message.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}\
                  {% else %}{{ message.role }}:{{ message.content }} {% endif %}{% endfor %}";
    let template = ChatTemplate::new(source.to_owned(), &SpecialTokens::default()).unwrap();
    let calls = serde_json::json!([{"function": {"name": "f", "arguments": {"z": 1, "a": [true, null]}}}]);
    let call = Message { tool_calls: Some(calls), ..Message::new("assistant", "") };
    let messages = [Message::new("user", "u"), call, Message::new("tool", "7")];
    let tools = serde_json::json!([{"name": "f", "b": 1, "a": 2}]);
    let text = template.render_with_tools(&messages, Some(&tools), true, None).unwrap();
    assert_eq!(text, r#"{"name": "f", "b": 1, "a": 2};user:u f({"z": 1, "a": [true, null]})tool:7 "#);
    let without = template.render(&messages[..1], true, None).unwrap();
    assert_eq!(without, "user:u ");
}
